"""The module that PyTorch loads for ``torch.compile(model, backend="penstock")``.

From then on calls of such models are noticed.
"""

from penstock.remat._door import compile_backend
from penstock.remat._dynamo import own_calls

__all__ = ["compile_backend"]

own_calls()  # on import: PyTorch asks for the context around calls before it calls the backend
