"""Imports of the process from which cases are forked; it starts no thread."""

import gc
import importlib
import os

from benchmarks import zoo

os.environ.setdefault("HF_HUB_OFFLINE", "1")
zoo.all_architectures()
for architecture_library in zoo.LIBRARIES:
    try:
        importlib.import_module(architecture_library)
    except ImportError:
        pass
for module in (
    "benchmarks.coverage_case",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
):
    importlib.import_module(module)
gc.freeze()  # a collection, and the search for living tensors, look at what a case makes alone
