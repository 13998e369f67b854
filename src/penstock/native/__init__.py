"""The few loops that are too slow in Python: plain C without other libraries' headers, called through ctypes.

Sources lie next to this file. If there is a C compiler, they are compiled for this machine when first needed, into a
cache by content (`$XDG_CACHE_HOME/penstock/native`). Otherwise the libraries that a wheel contains are loaded
(docs/design/native.md gives the reason for this order). Without either, `load` returns ``None``, callers use slower
Python code, and the user is told once.

- `load`: a library by the name of its source.
- `compile_source`, `can_compile`: the same for source text that is generated at run time, and whether it is possible.
- `keep_source`: text as a file in the same cache, `cache_folder`.
- `compile_extension`, `find_cpp_compiler`: the same for a C++ extension of Python, which tests use.
- `refuse_memory`, `allow_memory`, `address_of`, `can_refuse`: errors instead of the memory of a storage.
- `memory_library`, `keep_freed_blocks`, `drop_kept_blocks`: PyTorch's allocator for the CPU.
- `HostUpdatePass`, `UPDATES`, `PRECISIONS`: optimizers' updates in one pass over host memory.
- `find_compiler`, `describe_compiler`, `has_libraries`: what this machine and this installation have.
- `tell_what_is_slower`: tells the user before anything slow begins.
"""

from penstock.native._build import cache_folder as cache_folder
from penstock.native._build import can_compile as can_compile
from penstock.native._build import compile_source as compile_source
from penstock.native._build import describe_compiler as describe_compiler
from penstock.native._build import has_libraries as has_libraries
from penstock.native._build import keep_source as keep_source
from penstock.native._build import load as load
from penstock.native._build import tell_what_is_slower as tell_what_is_slower
from penstock.native._compiler import find_compiler as find_compiler
from penstock.native._extension import compile_extension as compile_extension
from penstock.native._extension import find_cpp_compiler as find_cpp_compiler
from penstock.native._guard import address_of as address_of
from penstock.native._guard import allow_memory as allow_memory
from penstock.native._guard import can_refuse as can_refuse
from penstock.native._guard import refuse_memory as refuse_memory
from penstock.native._memory import drop_kept_blocks as drop_kept_blocks
from penstock.native._memory import keep_freed_blocks as keep_freed_blocks
from penstock.native._memory import memory_library as memory_library
from penstock.native._updates import PRECISIONS as PRECISIONS
from penstock.native._updates import UPDATES as UPDATES
from penstock.native._updates import HostUpdatePass as HostUpdatePass
