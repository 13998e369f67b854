"""Relational layers on a graph whose edges stay in a file, under a hard cap of a quarter of what its tensors take.

The tensors are ``edge_index`` and ``edge_type``, 24 bytes an edge. A training process may take a quarter of that
beyond what it holds before it opens the graph: the system refuses more (``RLIMIT_DATA``, with room for stacks of
threads, which are reserved, not used). The same layers on the same edges in memory run without a cap, and once under
it, where they must fail. Time is predicted before it is measured. On real graphs, results and gradients are compared
with those in memory.

Run it with ``python -m benchmarks.relational_stream --disk /nvme --json relational-stream.json``.
"""

import gc
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Row, parser, show, write
from benchmarks.relational_graphs import GRAPHS
from penstock import unified
from penstock.relational import HGTConv, RelationalGraph, RGATConv, RGCNConv
from penstock.testing.graphs import MadeGraph
from penstock.units import format_bytes

LAYERS = ("RGCN", "RGAT", "HGT")
EQUAL_ON = ("FB15k-237", "AM-like")
EDGE_BYTES = 24
"""Bytes of an edge in ``edge_index`` and ``edge_type``."""
STACK_BYTES = 8 * 2**23
"""Address space for stacks of threads that begin under the cap."""


def conv(layer: str, width: int, num_types: int) -> torch.nn.Module:
    """Return a layer from rows to rows of the same width."""
    if layer == "RGCN":
        return RGCNConv(width, width, num_types)
    if layer == "RGAT":
        return RGATConv(width, width, num_types)
    metadata = (["node"], [("node", str(number), "node") for number in range(num_types)])
    return HGTConv(width, width, metadata, heads=4)


def status_bytes(field: str) -> int:
    """Return a field of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


@contextmanager
def highest(peak: list[int]) -> Iterator[None]:
    """Note the most anonymous memory that the process holds meanwhile, beyond what it holds now."""
    before, stops = status_bytes("RssAnon"), threading.Event()

    def look() -> None:
        while not stops.wait(0.005):
            peak.append(status_bytes("RssAnon") - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stops.set()
        thread.join()


def train(how: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, as the parent says. Return the times of steps, or the error."""
    made = MadeGraph(num_nodes=how["nodes"], num_edges=how["edges"], num_relations=how["types"])
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([conv(how["layer"], how["width"], how["types"]) for _ in range(how["layers"])])
    x = torch.randn(made.num_nodes, how["width"], requires_grad=True)

    def step(graph: RelationalGraph) -> float:
        convs.zero_grad()
        x.grad, rows = None, x
        for part in convs:
            rows = part(rows, graph)
        loss = rows.square().mean()
        loss.backward()
        return float(loss.detach())

    nothing = torch.zeros(2, 1, dtype=torch.int64)
    step(RelationalGraph(nothing, num_nodes=made.num_nodes, num_edge_types=made.num_relations))
    x.sum().backward(torch.ones(()))  # imports what PyTorch imports at this call
    gc.collect()
    if how["cap"]:
        limit = status_bytes("VmData") + how["cap"] + STACK_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer: dict[str, Any] = {}
    peak = [0]
    try:
        with highest(peak):
            if how["budget"]:
                graph: Any = RelationalGraph.stream(how["path"], budget=how["budget"])
                answer["predicted_s"] = graph.estimate(lambda: step(graph)).step_s
            else:
                edges, types = (torch.cat(parts, dim=-1) for parts in zip(*made.typed_edges(), strict=True))
                graph = RelationalGraph(edges, types, num_nodes=made.num_nodes, num_edge_types=made.num_relations)
                del edges, types
            step(graph)
            answer["steps_s"] = []
            for _ in range(how["steps"]):
                start_s = time.perf_counter()
                answer["loss"] = step(graph)
                answer["steps_s"].append(time.perf_counter() - start_s)
            if how["budget"]:
                done = graph.statistics()
                answer |= {"block_edges": done.num_edges / done.num_blocks, "stall_s": done.stall_s}
    except (MemoryError, RuntimeError) as error:
        answer = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return answer | {"peak_bytes": max(peak)}


def in_a_process(how: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of its own, in which a cap ends with it."""
    command = [sys.executable, "-m", "benchmarks.relational_stream", "--train", json.dumps(how)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"the process ended with {done.returncode}", "peak_bytes": 0}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def capped(settings: Any, folder: str) -> Iterator[Row]:
    """Yield what each layer does under the cap, and in memory without it."""
    made = MadeGraph(num_nodes=settings.nodes, num_edges=settings.edges, num_relations=settings.types)
    path, start_s = Path(folder) / "edges.graph", time.perf_counter()
    unified.write_graph(path, made.typed_edges(), num_nodes=made.num_nodes, num_types=settings.types, positions=False)
    yield Row(name="file", metric="time to write it", value=time.perf_counter() - start_s, unit="s")
    tensor_bytes = made.num_edges * EDGE_BYTES
    cap = tensor_bytes // 4
    yield Row(name="edge_index and edge_type", metric="size", value=tensor_bytes, unit="B")
    yield Row(name="file", metric="size", value=path.stat().st_size, unit="B")
    yield Row(name="cap", metric="bytes", value=cap, unit="B")
    for layer in LAYERS[: 1 if settings.quick else None]:
        for layers in (1,) if settings.quick else (1, 2):
            how = {
                "layer": layer, "layers": layers, "nodes": made.num_nodes, "edges": made.num_edges, "path": str(path),
                "types": settings.types, "width": settings.width, "steps": settings.rounds,
            }  # fmt: skip
            memory = in_a_process(how | {"cap": 0, "budget": None})
            refused = in_a_process(how | {"cap": cap, "budget": None, "steps": 1})
            ours = in_a_process(how | {"cap": cap, "budget": int(settings.share * cap)})
            name = f"{layer}, {layers} layer{'s' * (layers > 1)}"
            print(name, memory, refused, ours, flush=True)
            if "failed" in ours or "failed" in memory or "failed" not in refused:
                raise RuntimeError(f"{name}: streamed {ours}, in memory {memory}, in memory under the cap {refused}")
            step_s, in_memory_s = median(ours["steps_s"]), median(memory["steps_s"])
            yield Row(
                name=name, metric="step", value=step_s, unit="s", peer="in memory", ratio=step_s / in_memory_s
            )  # fmt: skip
            predicted_s = ours["predicted_s"]
            yield Row(
                name=name, metric="predicted step", value=predicted_s, unit="s", peer="measured",
                ratio=predicted_s / step_s,
            )  # fmt: skip
            yield Row(
                name=name, metric="memory", value=ours["peak_bytes"], unit="B", peer="in memory",
                ratio=ours["peak_bytes"] / memory["peak_bytes"],
            )  # fmt: skip
            yield Row(name=name, metric="edges in a block", value=ours["block_edges"], unit="")
            difference = abs(ours["loss"] - memory["loss"]) / abs(memory["loss"])
            yield Row(name=name, metric="difference of losses", value=difference, unit="")


def equal(settings: Any, folder: str) -> Iterator[Row]:
    """Yield how far results and gradients on real graphs are from those in memory, relative to the largest number."""
    for name in () if settings.quick else EQUAL_ON:
        edges = GRAPHS[name]()
        path = Path(folder) / f"{name}.graph"
        unified.write_graph(
            path, (edges.edge_index, edges.edge_type), num_nodes=edges.num_nodes, num_types=edges.num_edge_types
        )
        for layer in LAYERS:
            torch.manual_seed(0)
            part, values = conv(layer, 16, edges.num_edge_types), []
            for graph in (edges.graph(), RelationalGraph.stream(path, budget="24MiB")):
                part.zero_grad()
                x = torch.randn(edges.num_nodes, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
                result = part(x, graph)
                result.square().sum().backward()
                gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
                values.append([result.detach(), x.grad, *(gradient.clone() for gradient in gradients)])
            farthest = max(
                float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
                for theirs, ours in zip(*values, strict=True)
            )
            yield Row(name=f"{layer} on {name}", metric="difference from memory", value=farthest, unit="")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--nodes", type=int, default=75_000)
    options.add_argument("--edges", type=int, default=40_000_000)
    options.add_argument("--types", type=int, default=16)
    options.add_argument("--width", type=int, default=32)
    options.add_argument("--share", type=float, default=0.2, help="share of the cap that blocks may take")
    options.add_argument("--rounds", type=int, default=2, help="steps that are measured")
    options.add_argument("--train", help="for processes of this benchmark")
    settings = options.parse_args(arguments)
    if settings.train:
        print(json.dumps(train(json.loads(settings.train))))
        return
    if settings.quick:
        settings.nodes, settings.edges, settings.width, settings.rounds = 20_000, 8_000_000, 8, 1
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-stream-") as folder:
        rows = [*capped(settings, folder), *equal(settings, folder)]
    lines = []
    for row in rows:
        shown = format_bytes(int(row.value)) if row.unit == "B" else f"{row.value:,.3g} {row.unit}"
        lines.append([row.name, row.metric, shown, f"{row.ratio:.2f} of {row.peer}" if row.ratio else ""])
    title = f"{settings.nodes:,} nodes, {settings.edges:,} edges of {settings.types} types, width {settings.width}"
    show(title, ["what", "figure", "value", "beside"], lines)
    names = ("nodes", "edges", "types", "width", "share", "rounds")
    write(settings.json, {name: getattr(settings, name) for name in names}, rows)


if __name__ == "__main__":
    main()
