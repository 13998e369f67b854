"""Working calls of `tiers` and `probe`."""

import json
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.misuse_table import RECORDS, UNCALLED, USES, Arguments, Use, require
from benchmarks.soak_case import Case
from penstock import devices, probe, tiers


def _parks(waterfall: Any, _: Arguments) -> None:
    tensor = torch.arange(100_000)
    handle = waterfall.park(tensor.untyped_storage(), "numbers")
    layout = tiers.ViewLayout.of(tensor)
    expected = tensor.clone()
    del tensor
    waterfall.drain()
    try:
        require(torch.equal(layout.rebuild(handle.get()), expected), "parked bytes come back")
        handle.release()
    finally:
        waterfall.close()


def _all_park(waterfalls: Any, _: Arguments) -> None:
    for waterfall in waterfalls:
        _parks(waterfall, {})


def _left(waterfall: tiers.Waterfall) -> tiers.Handle:
    """Return a handle whose copy out has ended."""
    handle = waterfall.park(torch.arange(100_000).untyped_storage())
    waterfall.drain()
    return handle


_waterfalls: list[tiers.Waterfall] = []
"""Waterfalls of handles that `parked` made, in a case's own process."""


def parked(case: Case) -> tiers.Handle:
    """Return a handle."""
    _waterfalls.append(tiers.waterfall_for("cpu", tiers.Budget(disk=case.disk())))
    return _waterfalls[-1].park(torch.arange(100_000).untyped_storage(), "numbers")


def end_waterfalls(_: Any) -> None:
    while _waterfalls:
        _waterfalls.pop().close()


def buffer(size_bytes: int) -> memoryview:
    """Return memory aligned for direct I/O."""
    return memoryview(mmap.mmap(-1, size_bytes))


def _writes(tier: Any, _: Arguments) -> None:
    extent = tier.reserve(8192)
    try:
        for piece in extent.pieces:
            there, back = buffer(piece.size_bytes), buffer(piece.size_bytes)
            there[:] = bytes([7]) * piece.size_bytes
            tier.write(piece, there)
            tier.read(piece, back)
            require(back == there, "written bytes come back")
        tier.release(extent)
    finally:
        tier.close()


def _reserved(tier: Any) -> Any:
    return tier.reserve(4096)


_TIER_METHODS: Mapping[str, Callable[[Any], Arguments]] = {
    "reserve": lambda _: {"size_bytes": 4096},
    "release": lambda tier: {"extent": _reserved(tier)},
    "file_name": lambda tier: {"piece": _reserved(tier).pieces[0]},
    "write": lambda tier: {"piece": _reserved(tier).pieces[0], "view": buffer(4096)},
    "read": lambda tier: {"piece": _reserved(tier).pieces[0], "view": buffer(4096)},
    "view": lambda tier: {"extent": _reserved(tier)},
    "tensor": lambda tier: {"extent": _reserved(tier)},
    "prepare": lambda _: {"size_bytes": 4096},
    "allow": lambda _: {"capacity_bytes": 2**20},
}
_ON_A_DEVICE = frozenset({"write_storage", "read_storage", "open_to_device", "talks_to_device"})


def _accounts(budget: Any, _: Arguments) -> None:
    budget.charge("host", 0)
    require(budget.held_bytes("host") == 0, "an empty account")
    repr(budget), budget.uses()


def _budget_charged(budget: Any) -> Arguments:
    budget.charge("device", 10)
    return {"place": "device", "size_bytes": 10}


class Generators:
    """Random generators of a user's own."""

    def __init__(self) -> None:
        self.state = torch.get_rng_state()

    def get(self, device: str) -> torch.Tensor:
        return self.state

    def put(self, state: torch.Tensor, device: str) -> None:
        self.state = state


def _entered(context: Any, _: Arguments) -> None:
    with context:
        torch.rand(3)


def _event() -> tiers.Event:
    return tiers.Event(lane="out", kind="copy", label="a", size_bytes=4096, start_s=0.0, end_s=1.0)


def _traced(_: Any, arguments: Arguments) -> None:
    require(json.loads(Path(arguments["path"]).read_text())["traceEvents"] is not None, "a trace is JSON")


def _rebuilt(layout: Any, arguments: Arguments) -> None:
    require(
        torch.equal(layout.rebuild(arguments["tensor"].untyped_storage()), arguments["tensor"]), "the view is rebuilt"
    )


USES |= {
    "tiers.Budget": Use(
        call=tiers.Budget, good=lambda case: {"device": "1GiB", "host": "1MiB", "disk": {case.disk(): "1MiB"}},
        check=_accounts,
        methods={
            "charge": lambda _: {"place": "device", "size_bytes": 10}, "credit": _budget_charged,
            "enter": lambda _: {"footprint": tiers.Footprint(step_bytes=10)},
            "leave": lambda _: {"footprint": tiers.Footprint(step_bytes=10)},
            "step_room_bytes": lambda _: {"own": tiers.Footprint(step_bytes=10)},
            "leads_below": lambda _: {"device": torch.device("cpu")}, "alone": lambda _: {"device": 2**30},
            "named": lambda _: {"holder": "me"}, "held_bytes": lambda _: {"place": "device"},
            "peak_bytes": lambda _: {"place": "device"}, "room_bytes": lambda _: {"place": "device"},
        },
    ),
    "tiers.Charges": Use(
        call=tiers.Charges, good=lambda _: {"budget": tiers.Budget(device="1GiB"), "holder": "me"},
        check=lambda charges, _: (charges.charge("device", 10), charges.give_back()),
        methods={
            "charge": lambda _: {"place": "device", "size_bytes": 10},
            "enter": lambda _: {"footprint": tiers.Footprint(step_bytes=10)},
            "are_of": lambda _: {"budget": tiers.Budget()},
        },
    ),
    "tiers.Footprint": Use(
        call=tiers.Footprint,
        good=lambda _: {"tensors": {1: 10}, "held_bytes": 10, "step_bytes": 10, "runs_beside": False},
        check=lambda result, _: tiers.Budget(device="1GiB").enter(result),
    ),
    "tiers.waterfall_for": Use(
        call=tiers.waterfall_for, good=lambda case: {"device": "cpu", "budget": case.budget(disk=case.disk())},
        check=_parks,
    ),
    "tiers.waterfalls_for": Use(
        call=tiers.waterfalls_for,
        good=lambda case: {"devices": [torch.device("cpu")], "budget": case.budget(disk=case.disk())},
        check=_all_park,
    ),
    "tiers.Waterfall": Use(
        call=tiers.waterfall_for, good=lambda case: {"device": "cpu", "budget": case.budget(disk=case.disk())},
        check=_parks, made_by="tiers.waterfall_for",
        methods={
            "park": lambda _: {"storage": torch.arange(1000).untyped_storage()},
            "reserve": lambda waterfall: {"size_bytes": 4096},
            "borrow": lambda waterfall: {"original": _left(waterfall)},
            "give_back": lambda _: {"storage": torch.arange(1000).untyped_storage()},
            "hand_over": lambda _: {"storage": torch.arange(1000).untyped_storage()},
            "bound_in_flight": lambda _: {"size_bytes": 2**27},
        },
    ),
    "tiers.Handle": Use(
        call=parked, good=lambda case: {"case": case}, made_by="tiers.Waterfall.park", close=end_waterfalls
    ),
    "tiers.DiskTier": Use(
        call=tiers.DiskTier, good=lambda case: {"disk": case.disk(), "budget": case.budget(disk=case.disk())},
        check=_writes, methods=_TIER_METHODS, skips=_ON_A_DEVICE,
    ),
    "tiers.HostTier": Use(
        call=tiers.HostTier,
        good=lambda case: {"capacity": "1MiB", "pinned": False, "budget": case.budget(host="1MiB")},
        check=_writes, methods=_TIER_METHODS, skips=_ON_A_DEVICE,
    ),
    "tiers.EventLog": Use(
        call=tiers.EventLog, good=lambda _: {"capacity": 10},
        check=lambda log, _: require(
            log.add(lane="a", kind="b", label="c", size_bytes=1, start_s=0.0) in log.since() or not log.since(), "kept"
        ),
        methods={"add": lambda _: {"lane": "out", "kind": "copy", "label": "a", "size_bytes": 10, "start_s": 0.0}},
    ),
    "tiers.Gate": Use(call=tiers.Gate, good=lambda _: {}),
    "tiers.drawing_from": Use(
        call=tiers.drawing_from, good=lambda _: {"generators": Generators()}, check=_entered
    ),
    "tiers.generators_held": Use(call=tiers.generators_held, good=lambda _: {}, check=_entered),
    "tiers.generator_state": Use(
        call=tiers.generator_state, good=lambda _: {"device": "cpu"},
        check=lambda state, _: require(torch.equal(state, torch.get_rng_state()), "the state"),
    ),
    "tiers.set_generator_state": Use(
        call=tiers.set_generator_state, good=lambda _: {"state": torch.get_rng_state(), "device": "cpu"}
    ),
    "tiers.ViewLayout": Use(
        call=tiers.ViewLayout.of, good=lambda _: {"tensor": torch.arange(12).view(3, 4).t()}, check=_rebuilt,
        methods={
            "of": lambda _: {"tensor": torch.ones(3)},
            "rebuild": lambda _: {"storage": torch.arange(12).untyped_storage()},
        },
    ),
    "tiers.HeapKeeper": Use(
        call=tiers.HeapKeeper, good=lambda _: {"slack_bytes": 2**20}, check=lambda keeper, _: keeper.look()
    ),
    "tiers.trim_freed_memory": Use(call=tiers.trim_freed_memory, good=lambda _: {}),
    "tiers.ssd_life_s": Use(
        call=tiers.ssd_life_s,
        good=lambda _: {"capacity_bytes": 10**12, "written_bytes": 10**9, "duration_s": 1.0},
        check=lambda life_s, _: require(life_s >= 0, "a life"),
    ),
    "tiers.write_trace": Use(
        call=tiers.write_trace, good=lambda case: {"path": case.folder / "trace.json", "events": [_event()]},
        check=_traced,
    ),
    "tiers.version_of": Use(
        call=tiers.version_of, good=lambda _: {"tensor": torch.ones(3)},
        check=lambda version, arguments: require(version == arguments["tensor"]._version, "the version"),
    ),
    "tiers.check_version": Use(
        call=tiers.check_version, good=lambda _: {"tensor": torch.ones(3), "version": 0},
    ),
}  # fmt: skip
RECORDS |= {
    "tiers.PlaceUse": lambda: tiers.Budget(device=1).uses()[0],
    "tiers.Holder": lambda: tiers.Holder(name="me", held_bytes=0, peak_bytes=0),
    "tiers.Event": _event,
    "tiers.Extent": lambda: tiers.Extent(4096, (tiers.Piece(0, 0, 4096),)),
    "tiers.Piece": lambda: tiers.Piece(0, 0, 4096),
    "tiers.HandleState": lambda: next(iter(tiers.HandleState)),
    "tiers.TierStatistics": lambda: tiers.TierStatistics(
        parked_bytes=0, fetched_bytes=0, forwarded_bytes=0, kept_bytes=0, bounced_bytes=0, written_to_disk_bytes=0,
        stall_s=0.0, num_live_handles=0, num_failed_writes=0, in_flight_peak_bytes=0,
    ),
}  # fmt: skip
UNCALLED |= {
    "tiers.Size": "a type",
    "tiers.IN_FLIGHT_S": "a number",
    "tiers.MAX_IN_FLIGHT_BYTES": "a number",
    "tiers.DiskSpec": "a type",
    "tiers.Generators": "what a user's own class is like",
    "tiers.HostWork": "what a step on the host is like",
    "tiers.Tier": "abstract; DiskTier and HostTier stand for it",
    "tiers.gate": "the one Gate of the process; tiers.Gate stands for it",
}


# devices

USES |= {
    "devices.backend_of": Use(
        call=devices.backend_of, good=lambda _: {"device": "cpu"},
        check=lambda backend, _: require(backend.streams is None, "main memory"),
    ),
    "devices.has_backend": Use(
        call=devices.has_backend, good=lambda _: {"device": torch.device("cpu")},
        check=lambda has_one, _: require(has_one, "yes"),
    ),
    "devices.is_accelerator": Use(call=devices.is_accelerator, good=lambda _: {"device": torch.device("cpu")}),
    "devices.random_forked": Use(
        call=devices.random_forked, good=lambda _: {"devices": [torch.device("cpu")]}, check=_entered
    ),
    "devices.pin": Use(call=devices.pin, good=lambda _: {"memory": torch.ones(3)}),
    "devices.map_memory": Use(
        call=devices.map_memory, good=lambda _: {"size_bytes": 100},
        check=lambda memory, _: require(memory.nbytes == 100, "exact"),
    ),
    "devices.want_huge_pages": Use(call=devices.want_huge_pages, good=lambda _: {"memory": torch.ones(2**20)}),
    "devices.pinned_memory": Use(call=devices.pinned_memory, good=lambda _: {"size_bytes": 100}),
    "devices.on_node": Use(call=devices.on_node, good=lambda _: {"node": None}, check=_entered),
    "devices.stay_on_node": Use(call=devices.stay_on_node, good=lambda _: {"node": None}),
    "devices.accelerator_type": Use(call=devices.accelerator_type, good=lambda _: {}),
    "devices.accelerators": Use(call=devices.accelerators, good=lambda _: {}),
    "devices.kinds": Use(call=devices.kinds, good=lambda _: {}, check=lambda kinds, _: require("cpu" in kinds, "cpu")),
    "devices.used_device": Use(call=devices.used_device, good=lambda _: {}),
}  # fmt: skip
UNCALLED |= {
    "devices.Allocator": "abstract; each backend has its own",
    "devices.Peaks": "what a PeakWatch answers",
    "devices.PeakWatch": "Allocator.watching makes them",
    "devices.DeviceTimeline": "needs an accelerator",
    "devices.Backend": "abstract; devices.backend_of makes them",
    "devices.Streams": "what a fake is like",
    "devices.unpin": "needs a CUDA device",
    "devices.unpin_memory": "needs an accelerator",
}


# probe


def _measured(report: Any, _: Arguments) -> None:
    require(report.peak_bytes >= report.start_bytes >= 0, "a peak is no less than what was there")


def _recorded(context: Any, _: Arguments) -> None:
    with context as recording:
        torch.ones(1000).sum()
    require(recording.report is None or recording is not None, "a recording")


def _calls() -> Mapping[str, Callable[[], object]]:
    return {"ours": lambda: 1, "theirs": lambda: 2}


USES |= {
    "probe.peak_bytes": Use(
        call=probe.peak_bytes, good=lambda _: {"function": lambda: torch.ones(1000), "device": "cpu"}, check=_measured
    ),
    "probe.record_memory": Use(
        call=probe.record_memory, good=lambda _: {"device": "cpu", "this_thread_only": False},
        check=lambda context, _: _entered(context, {}),
    ),
    "probe.held_bytes": Use(
        call=probe.held_bytes, good=lambda _: {"device": "cpu"},
        check=lambda held, _: require(held >= 0, "bytes"),
    ),
    "probe.can_record": Use(call=probe.can_record, good=lambda _: {"device": "cpu"}),
    "probe.bandwidths": Use(
        call=probe.bandwidths, good=lambda case: {"directory": case.disk()},
        check=lambda lanes, _: require(all(lane.bandwidth_bytes_per_s > 0 for lane in lanes), "bandwidths"),
    ),
    "probe.link_rate_bytes_per_s": Use(
        call=probe.link_rate_bytes_per_s, good=lambda _: {"device": torch.device("cpu")},
        check=lambda rate, _: require(rate is None, "main memory has no link"),
    ),
    "probe.machine": Use(call=probe.machine, good=lambda case: {"directory": case.disk()}),
    "probe.gpu_direct_storage": Use(call=probe.gpu_direct_storage, good=lambda case: {"directory": case.disk()}),
    "probe.in_rounds": Use(
        call=probe.in_rounds, good=lambda _: {"ways": _calls(), "rounds": 2, "device": "cpu", "least_s": 0.0},
        check=lambda times, arguments: require(
            all(len(time_s) == arguments["rounds"] for time_s in times.values()), "a time per round"
        ),
    ),
    "probe.paired_ratio": Use(
        call=probe.paired_ratio, good=lambda _: {"ours": [1.0, 2.0], "theirs": [2.0, 4.0]},
        check=lambda ratio, _: require(ratio.median == 0.5, "a half"),
    ),
    "probe.provenance": Use(call=probe.provenance, good=lambda _: {"device": "cpu"}),
    "probe.Ledger": Use(
        call=probe.Ledger, good=lambda _: {}, check=lambda result, _: result.charge(0),
        methods={"charge": lambda _: {"size_bytes": 10}},
    ),
}  # fmt: skip
RECORDS |= {
    "probe.LaneBandwidth": lambda: probe.LaneBandwidth(
        lane="out", bandwidth_bytes_per_s=1.0, is_direct=True, measured_s=0.0
    ),
    "probe.Feature": lambda: probe.Feature(name="a", is_supported=False, reason="b"),
    "probe.MeasuredPlace": lambda: probe.MeasuredPlace(name="host", description="", capacity_bytes=1, free_bytes=1),
    "probe.MachineReport": lambda: probe.MachineReport(places=(), lanes=(), features=()),
    "probe.PeakReport": lambda: probe.PeakReport(
        peak_bytes=1, start_bytes=0, activation_bytes=1, released_bytes=0, rss_bytes=1,
        requested_bytes=1, reserved_bytes=0, timeline=(),
        result=None,
    ),
    "probe.Ratio": lambda: probe.Ratio(1.0, 1.0, 1.0),
    "probe.MemoryRecording": probe.MemoryRecording,
}  # fmt: skip
UNCALLED |= {"probe.ledger": "the one Ledger of the process; probe.Ledger stands for it"}
