"""Fixes for torchvision and torchaudio with a PyTorch for which their compiled operators are not built.

Their wheels are built against PyTorch for CUDA. Beside a PyTorch for the CPU alone the compiled libraries do not load:
torchvision then fails to import, since it describes operators that do not exist, and torchaudio fails because it takes
a library that is there and does not load for a broken installation. `usable` mends both before they are imported:

- torchvision gets the schemas of the operators that it describes at import, and `nms` in plain PyTorch, so that Faster
  R-CNN trains. For `roi_align` it has a plain version of its own, and takes it where the compiled one is missing; here
  that runs without its `torch.compile`, which takes a minute and would be no part of what is compared. What has no
  plain version (deformable convolution, the other ways to pool regions) raises as before.
- torchaudio is told that it has no compiled operators; it has plain versions of those that its models use.

Where the compiled libraries load, nothing is changed.
"""

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []
"""Libraries of operators, kept alive because their definitions vanish with them."""


@functools.cache
def usable() -> None:
    """Make torchvision and torchaudio importable here, if they are installed and do not load by themselves."""
    folder = _folder("torchvision")
    if folder is not None and "torchvision" not in sys.modules and not _loads(folder / "_C.so"):
        _mend_torchvision()
    folder = _folder("torchaudio")
    if folder is not None and "torchaudio" not in sys.modules and not _loads(folder / "lib" / "_torchaudio.abi3.so"):
        _mend_torchaudio()


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indexes of boxes, ``[n, 4]``, that overlap no better one by more than a threshold, best first."""
    order = scores.argsort(descending=True, stable=True)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        corners = torch.maximum(boxes[best, :2], boxes[order, :2]), torch.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = (corners[1] - corners[0]).clamp(min=0).prod(dim=1)
        order = order[shared <= iou_threshold * (areas[best] + areas[order] - shared)]
    return torch.stack(kept) if kept else order


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _loads(library: Path) -> bool:
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True


def _mend_torchvision() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CPU")
    _libraries.append(library)
    boxes = importlib.import_module("torchvision.ops.boxes")
    regions = sys.modules["torchvision.ops.roi_align"]  # the package's attribute of that name is the function
    regions.__dict__["_roi_align"] = regions._roi_align.__wrapped__
    boxes.__dict__["_assert_has_ops"] = lambda: None  # asked by `nms`, which is there now, and by rotated boxes


def _mend_torchaudio() -> None:
    def unavailable(function: object) -> object:
        return function

    extension = types.ModuleType("torchaudio._extension")
    extension.__dict__.update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False, _IS_ALIGN_AVAILABLE=False, fail_if_no_align=unavailable
    )
    sys.modules[extension.__name__] = extension
