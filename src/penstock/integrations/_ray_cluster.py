"""The nodes of a Ray cluster that train for a fleet: one actor on each, with its lease and its reports."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.fleet import DeviceStatistics
from penstock.integrations._ray_known import Devices, KnownNode, kind, num_cpus
from penstock.integrations._ray_node import NodeFleet, Report

GRACE_S = 2.0
"""Seconds after a node's loss in which its process may live on, and so its jobs and the node are left alone."""
MOST_LOSSES = 3
"""Number of actors that a node may lose, and of nodes in a row that a job may lose without progress in between."""
_REPORT_S = 0.5
_LOOK_S = 5.0
_BEGIN_S = 300.0
_CLOSE_S = 60.0


class Cluster:
    """The nodes of a cluster. Only this class calls Ray for them; what a loss means for jobs is the driver's."""

    def __init__(
        self,
        ray: Any,  # any: the module
        leases: Path,
        devices: Devices | Mapping[str, Devices] | None,
        options: Mapping[str, Any],
        *,
        asks_stopper: bool,
    ):
        self._ray, self._leases, self._devices, self._options = ray, leases, devices, options
        self._asks_stopper = asks_stopper
        self.nodes: dict[str, KnownNode] = {}
        """Nodes with an actor, by Ray's id."""
        self.past: list[DeviceStatistics] = []
        """Statistics of the devices of nodes that have ended."""
        self._num_begun: dict[str, int] = {}
        self._looked_s = -math.inf
        self._last_loss: str | None = None

    def make_folder(self) -> None:
        """Make the folder of leases; a lease in it belongs to an actor whose driver is gone, which then ends."""
        self._leases.mkdir(parents=True, exist_ok=True)
        for stale in self._leases.glob("*.lease"):
            stale.unlink(missing_ok=True)

    def look_for_nodes(self) -> str | None:
        """Begin with nodes that are new, every few seconds; return why no node can run jobs, else ``None``."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return None
        self._looked_s = time.monotonic()
        for entry in self._ray.nodes():
            id_ = entry["NodeID"]
            if entry["Alive"] and id_ not in self.nodes and self._num_begun.get(id_, 0) < MOST_LOSSES:
                devices = self._devices_of(entry)
                if devices:
                    self._begin(entry, devices)
        if not self.nodes:
            return self._last_loss or "the cluster has no suitable node; see `ray status` and devices_per_node="
        if not any(node.is_ready for node in self.nodes.values()):
            since_s = min(node.begun_s for node in self.nodes.values())
            if time.monotonic() - since_s > _BEGIN_S:
                return f"none started within {_BEGIN_S:.0f} s; others may use its CPUs or GPUs, see `ray status`"
        return None

    def news(self) -> Iterator[tuple[KnownNode, Report | str]]:
        """Wait a moment for nodes; yield those that have news: a report, or the reason why the node is lost.

        The node sends its next report after `answer`. Raises the error of a node that refuses its settings.
        """
        ray = self._ray
        futures = {node.news: node for node in self.nodes.values()}
        if not futures:
            time.sleep(_REPORT_S)  # a lost node may come back
            return
        first, _ = ray.wait(list(futures), num_returns=1, timeout=2 * _REPORT_S)
        ready, _ = ray.wait(list(futures), num_returns=len(futures), timeout=0) if first else ([], [])
        for future in ready:
            node = futures[future]
            try:
                news = ray.get(future)
            except ray.exceptions.RayTaskError as error:
                if not node.is_ready:
                    raise error.cause from None  # invalid settings
                news = str(error.cause)
            except ray.exceptions.RayError as error:
                news = type(error).__name__
            else:
                if not node.is_ready:
                    node.is_ready, node.host_bytes = True, news
                    self.answer(node, {})
                    continue
            yield node, news

    def answer(self, node: KnownNode, verdicts: Mapping[tuple[str, int], bool | str]) -> None:
        """Send a node the stopper's verdicts, and ask for its next report."""
        node.news = node.actor.report.remote(verdicts, _REPORT_S)

    def obey(self, node: KnownNode, verb: str, name: str) -> str:
        """Let a node pause, resume or stop a job, as the user asks. Returns why not, or an empty text."""
        try:
            return str(self._ray.get(node.actor.ask.remote(verb, name), timeout=_CLOSE_S))
        except self._ray.exceptions.RayError as error:
            return f"its node does not answer: {type(error).__name__}"

    def lose(self, node: KnownNode, reason: str) -> None:
        """End a node that failed. It may begin again soon, since perhaps only its actor has died."""
        self._end(node)
        self._looked_s = time.monotonic() - _LOOK_S + GRACE_S  # looks again after the grace period
        self._last_loss = f"the last node, {node.name}, was lost: {reason}"

    def end(self) -> None:
        """End all nodes after their current mini-batches, with checkpoints of unfinished jobs."""
        ray = self._ray
        ending = {node.actor.finish.remote(): node for node in self.nodes.values() if node.is_ready}
        done, _ = ray.wait(list(ending), num_returns=len(ending), timeout=_CLOSE_S) if ending else ([], [])
        for future in done:
            with suppress(ray.exceptions.RayError):
                ending[future].note_devices(ray.get(future))
        for node in list(self.nodes.values()):
            self._end(node)

    def _devices_of(self, entry: Mapping[str, Any]) -> Devices:
        """Return the devices that a node provides, if it has the resources for them."""
        resources = entry["Resources"]
        if isinstance(self._devices, Mapping):
            keys = ("NodeID", "NodeManagerAddress", "NodeManagerHostname")
            return next((self._devices[entry[key]] for key in keys if entry.get(key) in self._devices), ())
        devices: Devices = [f"cuda:{index}" for index in range(int(resources.get("GPU", 0)))] or ["cpu"]
        devices = devices if self._devices is None else self._devices
        fits = _num_gpus(devices) <= resources.get("GPU", 0) and resources.get("CPU", 0) > 0
        return devices if fits else ()

    def _begin(self, entry: Mapping[str, Any], devices: Devices) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        id_ = entry["NodeID"]
        self._num_begun[id_] = self._num_begun.get(id_, 0) + 1
        lease = self._leases / f"{id_[:12]}-{time.time_ns()}.lease"
        lease.write_text(f"{entry['NodeManagerAddress']}\n")
        actor = (
            self._ray.remote(NodeFleet)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(id_, soft=False),
                num_cpus=num_cpus(devices, entry["Resources"]),
                num_gpus=_num_gpus(devices),
                max_concurrency=8,  # `report` and `finish` block while other methods must be served
            )
            .remote()
        )
        options = {**self._options, "devices": list(devices)}
        news = actor.begin.remote(lease, asks_stopper=self._asks_stopper, options=options)
        name = f"{entry['NodeManagerAddress']}/{id_[:6]}"
        self.nodes[id_] = KnownNode(id_, name, actor, lease, len(devices), news)

    def _end(self, node: KnownNode) -> None:
        del self.nodes[node.id]
        self.past.extend(node.devices)
        node.lease.unlink(missing_ok=True)  # an actor that is still alive sees this, and ends
        with suppress(Exception):  # it is dead already
            self._ray.kill(node.actor)


def _num_gpus(devices: Devices) -> int:
    return sum(kind(device) != "cpu" for device in devices)
