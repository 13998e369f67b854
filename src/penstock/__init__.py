"""Penstock trains what does not fit, at nearly the speed of what does.

It moves bytes between the device, host memory and the SSD behind the computation, and never moves what it need not.

- `penstock.offload`: activations spill to host memory or SSD and are back before backward needs them.
- `penstock.remat`: one budget in bytes; a plan that keeps, recomputes or swaps every storage of a step.
- `penstock.fleet`: many models, each larger than a device, trained together on few devices.
- `penstock.unified`: feature tables larger than the device, or than memory, that index like a tensor.
- `penstock.relational`: relational graph layers, compiled.
- `penstock.advisor`: which of them fits a model and a budget best; `penstock.advise` asks it.
- `penstock.tiers`: the engine under them: budgets, pools, lanes, handles, event traces.
- `penstock.devices`: what differs between kinds of devices.
- `penstock.probe`: what this machine can do, and the true peak of a step.
- `penstock.integrations`: Hugging Face, Accelerate, Lightning, PyG, Optuna, TensorBoard, MLflow and Ray.
- `penstock.report`: pictures of what happened.
- `penstock.testing`: faults on demand, and assertions on gradients and peaks, for your tests and ours.
- `penstock.units` and `penstock.errors`: sizes as text, and everything that can go wrong.

Rooms load on first use.
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
