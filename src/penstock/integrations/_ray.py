"""A fleet over several machines: one Ray actor per node, which owns the node's devices and runs an ordinary `Fleet`.

Nothing that is computed travels through Ray, only jobs, as factories, and news of them. A job is on one node at a time.
It goes elsewhere through its checkpoint in the shared folder: when a node idles while another has jobs waiting, or when
its node is lost. Losses are those of a fleet on one machine, to the bit, where devices and their threads are alike.

Two writers of one folder would spoil it: a job of a lost node waits until an actor that is not dead after all has seen
its lease go. Known gap: that takes `_GRACE_S`, and a network file system may show the lease for longer.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from penstock.fleet import Fleet, Job, Results, Stopper, Tracker
from penstock.integrations._ray_driver import Driver
from penstock.integrations._ray_known import Devices
from penstock.tiers import Size


def run_on_ray(
    jobs: Iterable[Job],
    *,
    run_dir: str | Path,
    devices_per_node: Devices | Mapping[str, Devices] | None = None,
    budget: Size | None = None,
    address: str | None = None,
    resume: bool = False,
    stopper: Stopper | None = None,
    trackers: Sequence[Tracker] = (),
    progress: Literal["auto"] | None = "auto",
    **fleet_options: Any,  # those of Fleet
) -> Results:
    """Trains all jobs on the nodes of a Ray cluster and returns what came of them, as `penstock.fleet.run` does.

    ``run_dir``: a folder that all machines share. ``devices_per_node``: what each node gives; or per node, by its id,
    address or host name; by default all its GPUs, or one CPU device where it has none. ``address``: of the cluster; by
    default that of this process, of the environment, or a new one on this machine. ``stopper`` and ``trackers`` are
    called here, in this process. ``progress``: ``"auto"`` shows a line twice a minute. Other options are those of
    `Fleet` and hold for every node.

    Jobs are sent pickled, so that modules that their factories use must be importable on all nodes. A node that is lost
    is warned of (`NodeLostWarning`); its jobs go on elsewhere. Nodes that join the cluster are taken up.

    Raises `NodeLostError` when no node is left, ``ImportError`` without Ray, and what `Fleet` raises for its settings.
    """
    ray = _import_ray()
    for key in fleet_options:
        if key in ("devices", "jobs_dir") or key not in inspect.signature(Fleet).parameters:
            raise TypeError(f"run_on_ray has no {key}: it takes devices_per_node=['cuda:0'], and options of Fleet")
    begins_here = not ray.is_initialized()
    if begins_here:
        ray.init(address=address)
    try:
        options = {**fleet_options, "budget": budget}
        with Driver(ray, jobs, Path(run_dir).resolve(), devices_per_node, options, resume, stopper, trackers) as driver:
            return driver.run(progress)
    finally:
        if begins_here:
            ray.shutdown()


def _import_ray() -> Any:  # any: the module
    try:
        import ray
    except ImportError as error:
        raise ImportError("a fleet over several machines takes Ray: pip install 'penstock[ray]'") from error
    return ray
