"""A table that several machines hold together: the shares of its tiers as planned and as measured, and a model.

Processes of one gloo group take themselves for machines (``$PENSTOCK_MACHINE``), with one thread and ``--host`` bytes
each, and read mini-batches that are drawn by the table's scores, all at the same time. In turn:

- planned: `TieredFeatures(..., peers="copies")`, which measures its rates and plans by them.
- split: the same table, each row that fits in one memory only, as partitioned feature stores do.
- own: the same table, each machine with the same hottest rows, so that nobody asks anybody.

They share this machine's disk, memory and processors, which machines do not, and talk through its loopback. So the
shares are what is measured here, and rows a second only say what a message costs beside a read.

``--model`` instead plans for 8 to 64 machines from data sheets, with the expected accesses of a made graph. It says how
many rows a second the plan lets each machine read, beside the two others. No network was measured for it.

Run it with ``python -m benchmarks.unified_peers --disk /nvme --json unified-peers.json``.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.common import Row, parser, show, write
from benchmarks.unified_ranks import WIDTH, answers_of, made_rows
from penstock import unified
from penstock.machines import MACHINES
from penstock.testing.graphs import MadeGraph
from penstock.unified._peer_rows import PeerRows
from penstock.units import format_bytes

BATCH_ROWS = 5000
WAYS = {"planned": None, "split": (0.0, 1.0), "own": (1.0, 0.0)}
"""Seconds of a row from a peer and from a disk by which the memory is divided; ``None``: as measured."""
TIERS = ("memory here", "memory there", "disk here")
HELD_BY_ALL = "rows in memory that all hold"
READS_PER_S = 1_000_000
"""Random reads of 4 KiB a second: Samsung PM9A3 3.84 TB, product brief."""
DISK_ROW_S = 1 / min(READS_PER_S, MACHINES["h200"].read_bytes_per_s / (4 * WIDTH))
"""Seconds of a row from that disk."""
LINK_SHARE = 0.8
"""Share of a link's rate that messages reach: an assumption."""


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--machines", type=int, nargs="+", default=[2, 3, 4])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", type=int, default=60)
    options.add_argument("--rows", type=int, default=600_000)
    options.add_argument("--host", type=int, default=128 * 2**20, help="bytes of memory of a machine")
    options.add_argument("--model", action="store_true", help="plan for 8 to 64 machines; nothing is measured")
    options.add_argument("--nodes", type=int, default=1_000_000, help="nodes of the modelled graph, with 20 edges each")
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # a process of the benchmark itself
    options.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options.add_argument("--way", help=argparse.SUPPRESS)
    options.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.rows, settings.host, settings.machines = 1, 60_000, 24 * 2**20, [2]
        settings.batches, settings.nodes = 8, 20_000
    if settings.rank is not None:
        _work(settings)
    elif settings.model:
        rows = _modelled(settings)
        write(settings.json, {"nodes": settings.nodes, "link_share": LINK_SHARE, "reads_per_s": READS_PER_S}, rows)
    else:
        rows = _measured(settings)
        write(settings.json, {"rows": settings.rows, "row_bytes": 4 * WIDTH, "host": settings.host}, rows)


def _measured(settings: argparse.Namespace) -> list[Row]:
    results: dict[str, list[list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-peers-") as folder:
        file = Path(folder) / "rows.features"
        unified.write_features(file, made_rows(settings.rows), progress=False)
        for number in range(settings.rounds):
            for count in settings.machines:
                for way in WAYS:
                    meet = Path(folder) / f"{number}-{count}-{way}"
                    results.setdefault(f"{count} machines, {way}", []).append(_run(settings, file, meet, count, way))
            print(f"round {number + 1} of {settings.rounds}", flush=True)
    rows = _rows(results)
    lines = []
    for row in rows:
        beside = "" if row.ratio is None else f"{row.ratio:.2f} {row.peer}"
        lines.append([row.name, row.metric, f"{row.value:,.3g} {row.unit}", beside])
    title = f"{settings.rows:,} rows of {format_bytes(4 * WIDTH)}, host={format_bytes(settings.host)} a machine"
    show(title, ["machines", "figure", "median", "of"], lines)
    return rows


def _run(settings: argparse.Namespace, file: Path, meet: Path, count: int, way: str) -> list[dict[str, Any]]:
    """Return the figures of each process."""
    command = [
        sys.executable, "-m", "benchmarks.unified_peers", "--size", str(count), "--file", str(file), "--meet",
        str(meet), "--rows", str(settings.rows), "--host", str(settings.host), "--way", way, "--batches",
        str(settings.batches),
    ]  # fmt: skip
    return answers_of(command, [{"PENSTOCK_MACHINE": str(rank)} for rank in range(count)])


def _work(settings: argparse.Namespace) -> None:
    """Be one machine: open the table with the others, read, and print figures."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(settings.meet), settings.size)
    distributed.init_process_group("gloo", store=store, rank=settings.rank, world_size=settings.size)
    if WAYS[settings.way] is not None:
        PeerRows.row_seconds = lambda *_: WAYS[settings.way]  # type: ignore[method-assign,assignment,return-value]
    scores = 1 / (1 + torch.arange(settings.rows, dtype=torch.float64)) ** 0.7
    generator = torch.Generator().manual_seed(settings.rank)
    batches = [torch.multinomial(scores, BATCH_ROWS, generator=generator) for _ in range(settings.batches)]
    with unified.TieredFeatures(
        settings.file, host=settings.host, scores=scores, group=distributed.group.WORLD, peers="copies"
    ) as features:
        features[batches[0]]
        features.reset_statistics()
        distributed.barrier()
        start_s = time.perf_counter()
        for batch in batches:
            features[batch]
        wall_s = time.perf_counter() - start_s
        counts, plan = features.statistics(), features.plan
        total = BATCH_ROWS * settings.batches
        rows = counts.host_rows, counts.peer_rows, counts.disk_rows + counts.cached_rows, counts.shared_rows
        drawn = torch.cat(batches)
        expected = torch.zeros(settings.rows, dtype=torch.bool)
        expected[plan.host_rows.long()] = True
        assert int(expected[drawn].sum()) == counts.host_rows, "rows come from where the plan has them"
        distributed.barrier()
    assert plan.peers is not None
    answer = {
        "rows_per_s": total / wall_s,
        "measured": {name: count / total for name, count in zip((*TIERS, "read before"), rows, strict=True)},
        "planned": dict(zip(TIERS, (plan.host_share, plan.peer_share, plan.disk_share), strict=True)),
        "replicated": plan.num_replicated_rows / max(1, len(plan.host_rows)),
        "rates": {"peer": 1 / (plan.peers.peer_row_s or 1.0), "disk": 1 / (plan.peers.disk_row_s or 1.0)},
    }
    print(json.dumps(answer))
    distributed.destroy_process_group()


def _rows(results: dict[str, list[list[dict[str, Any]]]]) -> list[Row]:
    """Return medians over rounds, each of the mean of all machines."""
    rows = []
    for name, rounds in results.items():
        speeds = _means(rounds, "rows_per_s")
        rows.append(_speed(name, median(speeds)))
        count, way = name.split(", ")
        for other in [other for other in WAYS if other != way] if way == "planned" else []:
            beside = _means(results[f"{count}, {other}"], "rows_per_s")
            ratio = median(speed / its for speed, its in zip(speeds, beside, strict=True))
            rows.append(_speed(name, median(speeds), f"{count}, {other}", ratio))
        for what, tiers in (("measured", (*TIERS, "read before")), ("planned", TIERS)):
            for tier in tiers:
                value = median(_means(rounds, what, tier))
                rows.append(Row(name=name, metric=f"share of {tier}, {what}", value=value, unit="share"))
        rows.append(Row(name=name, metric=HELD_BY_ALL, value=median(_means(rounds, "replicated")), unit="share"))
        for key, metric in (("peer", "rate of a peer"), ("disk", "rate of the disk")) if way == "planned" else ():
            rows.append(Row(name=name, metric=metric, value=median(_means(rounds, "rates", key)), unit="rows/s"))
    return rows


def _speed(name: str, value: float, peer: str = "", ratio: float | None = None) -> Row:
    return Row(name=name, metric="rows read by a machine", value=value, unit="rows/s", peer=peer, ratio=ratio)


def _means(rounds: list[list[dict[str, Any]]], *keys: str) -> list[float]:
    """Return the mean of a figure of all machines in each round."""
    means = []
    for ranks in rounds:
        values: list[Any] = ranks
        for key in keys:
            values = [value[key] for value in values]
        means.append(sum(values) / len(values))
    return means


def _modelled(settings: argparse.Namespace) -> list[Row]:
    """Return what plans for many machines let each of them read."""
    made = MadeGraph(num_nodes=settings.nodes, num_edges=20 * settings.nodes)
    graph = unified.Graph(torch.cat(list(made.edges()), dim=1), num_nodes=settings.nodes)
    seeds = torch.arange(0, settings.nodes, 100)
    scores = unified.expected_accesses(graph, seeds, [15, 10], batch_size=512)
    rows, lines = [], []
    for part, num_machines, gigabits in itertools.product((64, 16), (8, 16, 32, 64), (100, 400)):
        case = f"{num_machines} machines, memory for 1/{part} each, {gigabits} Gbit/s"
        seconds = 4 * WIDTH / (LINK_SHARE * gigabits * 1e9 / 8), DISK_ROW_S
        speeds = {}
        for way, fixed in WAYS.items():
            kept, *shares = _shares(scores, settings.nodes // part, num_machines, fixed or seconds, way)
            speeds[way] = 1 / max(seconds[0] * shares[1], seconds[1] * shares[2], 1e-12)
            name = f"{case}, {way}"
            for tier, share in zip(TIERS, shares, strict=True):
                rows.append(Row(name=name, metric=f"share of {tier}", value=share, unit="share"))
            rows += [Row(name=name, metric=HELD_BY_ALL, value=kept, unit="share"), _speed(name, speeds[way])]
            lines.append([name, *(f"{share:.1%}" for share in (kept, *shares)), f"{speeds[way] / 1e6:,.2f}"])
        for other in ("split", "own"):
            rows.append(_speed(f"{case}, planned", speeds["planned"], other, speeds["planned"] / speeds[other]))
    titles = ["machines", "held by all", *TIERS, "million rows/s"]
    show(f"modelled: {settings.nodes:,} nodes, rows of {format_bytes(4 * WIDTH)}", titles, lines)
    return rows


def _shares(
    scores: torch.Tensor, room: int, num_machines: int, seconds: tuple[float, float], way: str
) -> tuple[float, float, float, float]:
    """Return the share of rows in memory that all hold, and of accesses to memory here, there and the disk."""
    if way == "split":  # memory that is left over stays empty
        held = float(scores.sort(descending=True).values[: num_machines * room].sum() / scores.sum())
        return 0.0, held / num_machines, held * (1 - 1 / num_machines), 1 - held
    peers = unified.Peers(num_machines=num_machines, machine=0, peer_row_s=seconds[0], disk_row_s=seconds[1])
    problem = unified.TierProblem(
        num_rows=len(scores), row_bytes=4 * WIDTH, device_bytes=0, host_bytes=4 * WIDTH * room, scores=scores,
        peers=peers,
    )  # fmt: skip
    plan = unified.plan_tiers(problem)
    unified.verify(problem, plan)
    kept = plan.num_replicated_rows / len(plan.host_rows)
    return kept, plan.host_share, plan.peer_share, plan.disk_share


if __name__ == "__main__":
    main()
