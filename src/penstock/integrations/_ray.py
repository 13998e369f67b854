"""A fleet over several machines: one Ray actor per node owns the node's devices and runs an ordinary `Fleet`.

Ray carries only jobs, as factories, and reports on them, not what is computed. A job is on one node at a time. It moves
through its checkpoint in the shared folder, either when a node is idle while another has jobs waiting, or when its node
is lost. Losses are bit-identical to those of a fleet on one machine if devices and their threads are alike.

Two processes that write to one folder would damage it. So a job of a lost node waits long enough for an actor that is
still alive to see that its lease is gone. Known gap: this wait is `_GRACE_S`, and a network file system may show the
lease for longer.
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
    """Train all jobs on the nodes of a Ray cluster; return the results, as `penstock.fleet.run` does.

    ``run_dir`` is a folder that all machines share. ``devices_per_node`` is what each node provides, or a dict of that
    by the node's id, address or host name; by default a node provides all its GPUs, or one CPU device if it has none.
    ``address`` is that of the cluster; by default it comes from this process or the environment, or a new cluster is
    started on this machine. ``stopper`` and ``trackers`` are called in this process. ``progress="auto"`` shows a line
    twice a minute. Other options are those of `Fleet` and hold for every node.

    Jobs are sent as pickles, so modules that their factories use must be importable on all nodes. If a node is lost you
    get a warning (`NodeLostWarning`), and its jobs continue elsewhere. Nodes that join the cluster later are used.

    Raises `NodeLostError` when no node is left, ``ImportError`` without Ray, and what `Fleet` raises for its settings.
    """
    ray = _import_ray()
    for key in fleet_options:
        if key in ("devices", "jobs_dir") or key not in inspect.signature(Fleet).parameters:
            raise TypeError(f"run_on_ray has no option {key}; give devices_per_node=['cuda:0'] and options of Fleet")
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
        raise ImportError("a fleet over several machines needs Ray: pip install 'penstock[ray]'") from error
    return ray
