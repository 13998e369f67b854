"""Advice to the driver about memory that devices read in place, where the driver accepts it."""

from typing import Any, Literal

import torch

from penstock.arguments import checked
from penstock.unified._tensor import UnifiedTensor

Advice = Literal["read mostly", "prefer host", "prefer device"]
"""Devices may keep copies; pages stay in host memory; pages move to the device."""
_NAMES = {
    "read mostly": "cudaMemAdviseSetReadMostly",
    "prefer host": "cudaMemAdviseSetPreferredLocation",
    "prefer device": "cudaMemAdviseSetPreferredLocation",
}


@checked("penstock.unified.advise(table, 'read mostly')")
def advise(tensor: UnifiedTensor, advice: Advice) -> bool:
    """Advise CUDA about the memory of a unified tensor (``cudaMemAdvise``); return whether CUDA accepted it.

    Only machines whose devices read pageable memory (Grace, or Linux with HMM) accept advice about host memory.
    Elsewhere, and without the package ``cuda-bindings``, which comes with PyTorch for CUDA, nothing happens.

    Raises ``ValueError`` for unknown advice.
    """
    runtime = _runtime()
    if runtime is None or not tensor.nbytes:
        return False
    device = torch.cuda.current_device()
    error, pageable = runtime.cudaDeviceGetAttribute(runtime.cudaDeviceAttr.cudaDevAttrPageableMemoryAccess, device)
    if int(error) or not pageable:
        return False
    kind = getattr(runtime.cudaMemoryAdvise, _NAMES[advice])
    where = _location(runtime, device if advice == "prefer device" else -1)
    (error,) = runtime.cudaMemAdvise(tensor.cpu().data_ptr(), tensor.nbytes, kind, where)
    return int(error) == 0


def _runtime() -> Any:
    if not torch.cuda.is_available():
        return None
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def _location(runtime: Any, device: int) -> Any:
    """Return the runtime's name of a device; -1 means the host, which has its own location type since CUDA 13."""
    if int(runtime.CUDART_VERSION) < 13000:
        return device
    location = runtime.cudaMemLocation()
    kinds = runtime.cudaMemLocationType
    location.type = kinds.cudaMemLocationTypeHost if device < 0 else kinds.cudaMemLocationTypeDevice
    location.id = max(device, 0)
    return location
