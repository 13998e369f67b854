"""The few loops that Python cannot run: plain C without headers of others, called through ctypes.

Sources lie beside this file and are compiled when first needed, by the machine's own compiler, into a cache by content
(`$XDG_CACHE_HOME/penstock/native`); docs/design/native.md says why not at installation. Without a compiler `load`
returns ``None``, callers take their slower way in Python, and one warning says so.

- `load`: a library by the name of its source.
- `compile_source`: the same for source text that is made at run time.
- `keep_source`: source text as a file in the same cache.
"""

from penstock.native._build import compile_source as compile_source
from penstock.native._build import keep_source as keep_source
from penstock.native._build import load as load
