"""The few loops that Python cannot run: plain C without headers of others, called through ctypes.

Sources lie beside this file. Where there is a C compiler they are compiled when first needed, for this machine, into a
cache by content (`$XDG_CACHE_HOME/penstock/native`); elsewhere the libraries that a wheel brings along are loaded
(docs/design/native.md says why in this order). Without either `load` returns ``None``, callers take their slower way in
Python, and the user is told once.

- `load`: a library by the name of its source.
- `compile_source`, `can_compile`: the same for source text that is made at run time, and whether it is possible.
- `keep_source`: text as a file in the same cache, `cache_folder`.
- `compile_extension`, `find_cpp_compiler`: the same for a C++ extension of Python, which tests use.
- `find_compiler`, `describe_compiler`, `has_libraries`: what there is on this machine.
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
