"""Penstock trains PyTorch models that do not fit the memory of your device.

While the device computes, Penstock copies tensors between device memory, host memory and SSD in the background, and
copies only what the memory budget requires.

- `penstock.offload`: moves activations, or all state of a model, to host memory or SSD and back before they are used.
- `penstock.remat`: plans a step for one budget in bytes: it keeps, recomputes or swaps each storage.
- `penstock.fleet`: trains many models, each of which may exceed a device, on a few devices.
- `penstock.unified`: feature tables larger than the device, or than memory, that you index like a tensor.
- `penstock.relational`: relational graph layers, compiled.
- `penstock.advisor`: finds which of them fits a model and a budget best; `penstock.advise` asks it.
- `penstock.tiers`: the engine under them, with budgets, pools, lanes, handles and event traces.
- `penstock.devices`: the differences between kinds of devices.
- `penstock.probe`: what this machine can do, and the true peak memory of a step.
- `penstock.integrations`: Hugging Face, Accelerate, Lightning, PyG, Optuna, TensorBoard, MLflow and Ray.
- `penstock.report`: pictures of a run.
- `penstock.testing`: faults on demand, and assertions on gradients and peaks, for your tests and ours.
- `penstock.units` and `penstock.errors`: sizes as text, and all errors and warnings.

Each subpackage is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from penstock._version import __version__ as __version__

if TYPE_CHECKING:
    from penstock import advisor as advisor
    from penstock import devices as devices
    from penstock import errors as errors
    from penstock import fleet as fleet
    from penstock import integrations as integrations
    from penstock import offload as offload
    from penstock import probe as probe
    from penstock import relational as relational
    from penstock import remat as remat
    from penstock import report as report
    from penstock import testing as testing
    from penstock import tiers as tiers
    from penstock import unified as unified
    from penstock import units as units
    from penstock.advisor import advise as advise

_ROOMS = (
    "advisor", "devices", "errors", "fleet", "integrations", "offload", "probe", "relational", "remat", "report",
    "testing", "tiers", "unified", "units",
)  # fmt: skip


def __getattr__(name: str) -> Any:  # any: a room, or `advise`
    if name == "advise":
        return importlib.import_module("penstock.advisor").advise
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}; its rooms are {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS, "advise"])
