"""Cases of one room: offloading, planned steps, tiered features."""

import contextlib
import errno
import functools
import gc
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.soak_case import Case, Injected, bits
from benchmarks.soak_models import KINDS, Loop, Workload, compare, draw, train
from penstock import offload, probe, remat, unified
from penstock.errors import BudgetError, CaptureError, FeatureFileError, PenstockWarning, TierReadError
from penstock.testing import FaultyTier
from penstock.tiers import DiskTier

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "offload"))
from _helpers import everything_parked  # one way to make plans park all

TIER_FAULTS = ("full", "write_error", "read_error", "short_write", "short_read", "corrupt")
TIMES = 2
"""Number of failures of a step after which faults stop."""


class Faults:
    """The faults of a case's tiers, until they are told to stop."""

    def __init__(self, case: Case, kinds: tuple[str, ...] = TIER_FAULTS):
        self.case, self.made = case, list[FaultyTier]()
        self.probability = {
            kind: case.choices.choice((0.02, 0.1, 0.4)) for kind in kinds if case.choices.random() < 0.4
        }
        case.drawn["tier faults"] = dict(self.probability)
        wait_s = case.draw("slow disk", (0.0, 0.0, 0.0, 0.0005))
        self.wait = (lambda: time.sleep(wait_s)) if wait_s else None
        if wait_s:
            case.injected("slow disk")

    def tier(self, *arguments: Any, **options: Any) -> FaultyTier:
        seed = self.case.choices.randrange(2**30)
        self.made.append(FaultyTier(DiskTier(*arguments, **options), seed=seed, wait=self.wait, **self.probability))
        return self.made[-1]

    def stop(self) -> None:
        for tier in self.made:
            tier._probability = dict.fromkeys(tier._probability, 0.0)

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """Make tiers that are created inside the block fail."""
        with mock.patch("penstock.tiers._build.DiskTier", self.tier):
            yield
        for tier in self.made:
            for kind, count in tier.injected.items():
                self.case.injected(kind.replace("_", " "), count)


class Harm:
    """Exceptions in forward and backward, folders that go, files that may not grow."""

    def __init__(self, case: Case, faults: Faults, model: nn.Module, disk: Path | None):
        self.case, self.faults, self.disk, self.model = case, faults, disk, model
        kinds = ("none", "none", "forward", "backward", "no backward", "no folder", "read-only folder", "small files")
        self.kind = case.draw("harm", kinds)
        self.at, self.num_failures, self.is_armed, self.hooks = case.draw("harmed step", (0, 1, 2)), 0, False, []
        modules = [module for name, module in model.named_modules() if name and not list(module.children())]
        self.victim = case.choices.choice(modules)
        if self.kind == "forward":
            self.victim.register_forward_hook(lambda *_: self.strike())
        elif self.kind == "backward":
            self.victim.register_forward_hook(lambda _, __, output: self.in_backward(output))

    def strike(self, *_: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            self.case.injected(f"exception in {self.kind}")
            raise Injected("in the middle")

    def in_backward(self, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if self.is_armed and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(self.strike)

    def before_step(self, step: int) -> None:
        if step != self.at or self.num_failures:
            return
        if self.kind in ("forward", "backward"):
            self.is_armed = True
        elif self.kind == "no folder" and self.disk is not None:
            self.case.injected("folder removed")
            self.disk.rmdir()
            self.kind = "none"
        elif self.kind == "read-only folder" and self.disk is not None:
            self.case.injected("folder read-only")
            self.disk.chmod(0o500)
            self.kind = "none"
        elif self.kind == "small files":
            self.case.injected("files may not grow")
            small = self.case.choices.choice((0, 8192, 2**17))
            resource.setrlimit(resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))
            self.kind = "none"

    def failed(self, error: BaseException) -> None:
        """Note that a step raised an allowed error."""
        self.num_failures += 1
        self.is_armed = False
        self.case.figures[f"raised: {type(error).__name__}"] += 1
        if isinstance(error, TierReadError):
            injected = sum(sum(tier.injected.values()) for tier in self.faults.made)
            if not injected:
                self.case.found("undocumented error", f"without a fault: {error}")
        if self.num_failures >= TIMES:
            self.faults.stop()
        gc.collect()

    def over(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if self.disk is not None and self.disk.is_dir():
            self.disk.chmod(0o700)


def offloaded(case: Case, kinds: tuple[str, ...] = KINDS, *, checkpoints: bool = False) -> None:
    """Train an eager model with hooks, within a budget between tight and none."""
    workload, loop = draw(case, kinds, checkpoints=checkpoints), Loop.drawn(case)
    expected = train(case, workload, loop, workload.build())
    faults, model = Faults(case), workload.build()
    disk = case.disk()
    limit = case.draw("disk limit", (None, None, "64KiB", "1MiB", 0))
    share = case.draw("budget", (None, None, 0.3, 0.7, 0.95))
    device = None if share is None else _device_budget(workload, loop, share)
    options = {
        "min_size": case.draw("min_size", (0, 0, 4096, "1MiB")),
        "max_in_flight": case.draw("in flight", (4096, "1MiB")),
        "verify": "corrupt" in faults.probability or case.draw("verify", (False, True)), "min_saving": 0.0,
        "max_stall": 1.0, "checkpoint_inputs_only": checkpoints and case.draw("inputs only", (False, True)),
    }  # fmt: skip
    is_forced = device is None and case.draw("all parked", (True, True, False))
    harm = Harm(case, faults, model, disk)
    with faults.injected(), contextlib.ExitStack() as stack:
        stack.enter_context(everything_parked() if is_forced else contextlib.nullcontext())
        make = lambda size: offload.activations(  # noqa: E731
            model, budget=case.budget(device=size, disk={disk: limit}), **options
        )
        offloader = _kept_budget(case, make, device)
        holder: dict[str, Any] = {"offloader": offloader}

        def settle() -> None:
            if case.choices.random() < 0.7:  # so that nothing comes back from memory
                for waterfall in holder["offloader"]._waterfalls.values():
                    waterfall.drain()

        def failed(error: BaseException) -> None:
            if not isinstance(error, BudgetError):
                harm.failed(error)
                return
            case.figures["refused budgets"] += 1
            holder["offloader"].close()
            case.disk()  # which a harm may have taken away
            holder["offloader"] = make(_named(case, error))
            holder["refusals"] += 1
            if holder["refusals"] > 3:
                is_hit = limit is not None or any(sum(tier.injected.values()) for tier in faults.made)
                is_hit |= case.drawn["harm"] != "none"  # such as a graph that waits for a backward that never comes
                if not is_hit:  # what cannot leave stays, and the budget is refused with what that takes
                    case.found("budget", f"refused again and again: {error}")
                holder["offloader"].close()
                holder["offloader"] = make(None)

        def before_step(step: int) -> None:
            if holder.get("step") != step:  # whose budget the last step's gradients, which are kept, count against
                holder.update(step=step, refusals=0)
            harm.before_step(step)
            if harm.kind == "no backward" and step == harm.at:
                case.injected("forward without backward")
                kept = [buffer.clone() for buffer in model.buffers()]
                with holder["offloader"]:
                    workload.loss(model, workload.batches[0])
                for buffer, value in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(value)

        try:
            ours = train(
                case, workload, loop, model, around=lambda: holder["offloader"], before_backward=settle,
                allowed=(TierReadError, Injected, BudgetError), failed=failed, before_step=before_step,
            )  # fmt: skip
        finally:
            harm.over()
        gc.collect()
        statistics = holder["offloader"].tier_statistics()
        case.figures["bytes parked"] += statistics.parked_bytes
        settle()
        holder["offloader"].close()
    compare(case, ours, expected)


def _device_budget(workload: Workload, loop: Loop, share: float) -> int:
    """Draw a budget between what is there before a step and the plain peak."""
    model = workload.build()

    def step() -> None:
        for micro in range(loop.accumulate):
            (workload.loss(model, workload.batches[micro % len(workload.batches)]) / loop.accumulate).backward()

    step()
    gc.collect()
    report = probe.peak_bytes(step, device="cpu")
    return report.start_bytes + int(share * report.activation_bytes)


def _kept_budget(case: Case, make: Callable[[int | None], Any], size: int | None) -> Any:
    """Return the result of ``make``; if ``size`` is refused, that of ``make`` with the size that the refusal names."""
    try:
        return make(size)
    except BudgetError as error:
        case.figures["refused budgets"] += 1
        named = _named(case, error)
    try:
        return make(named)
    except BudgetError as error:
        case.found("budget", f"{size} was refused for {named}, and that too: {error}")
        return make(None)


def _named(case: Case, error: BaseException) -> int | None:
    """Return the number of bytes that a refusal names."""
    named = r"at least (\d+) bytes|took (\d+) bytes|`(?:host_)?budget` must be at least (\d+)"
    match = re.search(named, str(error))
    if match is None:
        case.found("budget", f"a refusal without a number: {error}")
        return None
    return int(next(group for group in match.groups() if group))


def planned(case: Case, kinds: tuple[str, ...] = KINDS) -> None:
    """Train a step within a budget: `optimize`, `compile`, or the backend of `torch.compile`."""
    workload, loop = draw(case, kinds), Loop.drawn(case)
    if case.drawn["model"] == "lstm":  # whose weights are used in every time step: see the limits of remat's page
        workload, case.drawn["autocast"] = replace(workload, dtype=None), None
    expected = train(case, workload, loop, workload.build())
    faults, model = Faults(case), workload.build()
    method = case.draw("method", ("recompute", "hybrid", "swap"))
    disk = None if method == "recompute" else case.disk()
    verify = "corrupt" in faults.probability or case.draw("verify", (False, False, True))  # by a checksum
    case.drawn["verify"] = verify
    options = {"method": method, "verify": verify}
    door = case.draw("door", ("optimize", "optimize", "compile", "string"))
    share = case.draw("budget", (-0.3, 0.0, 0.1, 0.5, 1.2))
    batch = workload.batches[0]
    function = lambda *arguments: workload.loss(model, arguments)  # noqa: E731
    for parameter in model.parameters() if loop.keeps_gradients else ():
        parameter.grad = torch.zeros_like(parameter)
    places = {} if disk is None else {"disk": {disk: None}}
    try:
        free = remat.optimize(function, batch, case.budget(**places), fullgraph=True, **options).plan
    except CaptureError as error:
        case.figures["raised: CaptureError"] += 1
        case.drawn["refused"] = str(error)[:200]
        return
    problem = free.problem
    low, high = remat.smallest_budget_bytes(problem, method=method), remat.plan(problem, 2**62).keep_all_peak_bytes
    size = int(low + share * (high - low)) if share >= 0 else int(low * (1 + share))

    def make(size: int | None) -> Any:
        account = case.budget(device=size, **places)
        if door == "optimize":
            return remat.optimize(function, batch, account, profile=problem, **options)
        settings = {"budget": account, "profile": problem, **options}
        if door == "compile":
            compiled: Any = remat.compile(function, **settings)
        else:
            compiled = torch.compile(function, backend="penstock", options=settings)
        if size is not None and size < low:
            compiled(*batch)
        return compiled

    with faults.injected():
        try:
            step = make(size)
        except BudgetError as error:
            case.figures["refused budgets"] += 1
            if size >= low:
                case.found("budget", f"{size} of at least {low} was refused: {error}")
            size = _named(case, error) or high
            step = make(size)
        harm = Harm(case, faults, nn.Sequential(nn.Sequential(nn.Identity())), disk)  # no hooks in what is captured
        if harm.kind == "no backward":
            harm.kind = "none"
        try:
            ours = train(
                case, workload, loop, model, step=lambda batch: step(*batch),
                allowed=(TierReadError, FileNotFoundError),
                failed=functools.partial(_planned_again, harm, disk), before_step=harm.before_step,
            )  # fmt: skip
            _peak(case, step, model, loop, batch, problem, size, faults)
        finally:
            harm.over()
        step = None
    compare(case, ours, expected)


def _planned_again(harm: Harm, disk: Path | None, error: BaseException) -> None:
    """Run a step, which may fail if the disk does; plan it once more if the disk's folder has gone."""
    if not isinstance(error, TierReadError):
        if disk is None or disk.exists() or "does not exist" not in str(error):
            raise error
        disk.mkdir()
    harm.failed(error)


def _peak(
    case: Case, step: Any, model: nn.Module, loop: Loop, batch: Any, problem: Any, size: int, faults: Faults
) -> None:
    """Check that the step's true peak stays within the budget. Faults stop first, since what cannot leave stays."""
    if sum(sum(tier.injected.values()) for tier in faults.made) or case.drawn["verify"] or faults.wait:
        return
    if case.drawn.get("harm", "none") != "none":
        return
    if any(parameter.grad is None for parameter in model.parameters()):
        return

    def whole() -> None:
        for parameter in model.parameters():
            parameter.grad.zero_()
        (step(*batch) / loop.accumulate).backward()

    whole()
    gc.collect()
    measured = probe.peak_bytes(whole, device="cpu").activation_bytes
    states = torch.get_rng_state().nbytes * sum("dropout" in operator.target for operator in problem.operators)
    allowed = size - problem.static_bytes + states + 4096
    case.figures["peaks measured"] += 1
    if measured > 1.01 * allowed:
        case.found("over budget", f"{measured} bytes of activations, {allowed} allowed by a budget of {size}")


def features(case: Case) -> None:
    """Train from rows on three tiers, through a loader."""
    with contextlib.ExitStack() as stack:
        _features(case, stack)


def _features(case: Case, stack: contextlib.ExitStack) -> None:
    generator = torch.Generator().manual_seed(case.choices.randrange(2**30))
    num_rows, width = case.draw("rows", (50, 3000, 20_000)), case.draw("width", (1, 9, 130))
    dtype = case.draw("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.int8))
    table = torch.randint(-50, 50, (num_rows, width), generator=generator).to(dtype)
    faults: Any = case.draw(
        "harm", ("none", "none", "cut short", "no folder", "read fails", "closed early", "small files")
    )
    source = _source(case, table)
    disk = case.disk()
    host = case.draw("host", (None, "8MiB", "3MiB", 300_000, 60_000, 2_000))
    if case.draw("buffers", (True, False)):  # else all rows of small tables lie beside the buffers' bytes
        stack.enter_context(mock.patch("penstock.unified._tiered.buffer_bytes_for", return_value=0))
    make = lambda size: unified.TieredFeatures(  # noqa: E731
        source, host=size, disk=disk if isinstance(source, torch.Tensor) else None,
        in_flight=case.drawn.setdefault("in flight", case.choices.choice((None, 0, 4096))),
        dtype=torch.float32 if dtype.is_floating_point and case.drawn["rows"] == 50 else None,
        budget=case.budget(host=None, disk={disk: None}), progress=False,
        verify=case.drawn.setdefault("verify", case.choices.random() < 0.5),
    )  # fmt: skip
    limits = contextlib.ExitStack()
    if faults == "small files":
        case.injected("files may not grow")
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        reset = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        limits.callback(resource.setrlimit, resource.RLIMIT_FSIZE, reset)
    with limits:
        try:
            features = _kept_budget(case, make, None if host is None else _bytes(host))
        except OSError as error:
            if faults != "small files" or error.errno not in (errno.EFBIG, errno.ENOSPC):
                raise
            case.figures[f"raised: {type(error).__name__}"] += 1
            return
    expected = table.to(features.dtype)
    edges = torch.randint(num_rows, (2, 5 * num_rows), generator=generator)
    loader = unified.Loader(
        unified.NeighborSampler(unified.Graph(edges, num_nodes=num_rows), [3, 2]), features, torch.arange(num_rows),
        batch_size=case.draw("batch", (7, 64)), ahead=case.draw("ahead", (0, 1, 4)), seed=case.seed % 1000,
    )  # fmt: skip
    model = nn.Linear(width, 4)
    with features:
        try:
            for number, batch in enumerate(loader):
                if not case.equal(f"rows of mini-batch {number}", batch.x, expected[batch.nodes]):
                    break
                model(batch.x.float()).square().mean().backward()
                case.figures["steps"] += 1
                if number == 2:
                    _harm_features(case, faults, features, source, disk)
                if number >= 12 or (faults == "closed early" and number == 3):
                    break
            index = torch.randint(num_rows, (200,), generator=generator)
            case.equal("rows by index", features[index], expected[index])
        except (TierReadError, FeatureFileError) as error:
            case.figures[f"raised: {type(error).__name__}"] += 1
            if faults not in ("cut short", "read fails"):
                raise


def _bytes(size: int | str) -> int:
    from penstock.units import parse_bytes

    return parse_bytes(size)


def _source(case: Case, table: torch.Tensor) -> Any:
    kind = case.draw("source", ("tensor", "npy", "safetensors", "rows"))
    folder = case.folder / "tables"
    folder.mkdir(exist_ok=True)
    if kind == "npy" and table.dtype is not torch.bfloat16:
        import numpy as np

        np.save(folder / "x.npy", table.numpy())
        return folder / "x.npy"
    if kind == "safetensors":
        save_file({"x": table}, folder / "x.safetensors")
        return str(folder / "x.safetensors")
    return unified.write_features(folder / "x.rows", table, progress=False) if kind == "rows" else table


def _harm_features(case: Case, kind: str, features: Any, source: Any, disk: Path) -> None:
    if kind == "cut short" and not isinstance(source, torch.Tensor):
        case.injected("file cut short")
        os.truncate(source, case.choices.randrange(os.path.getsize(source)))
    elif kind == "no folder":
        case.injected("folder removed")
        disk.rmdir()
    elif kind == "read fails" and features._files is not None:
        case.injected("failed read")
        with contextlib.ExitStack() as stack:
            descriptor = os.open(case.folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            os.dup2(descriptor, features._files._descriptors[0])


def relational(case: Case) -> None:
    """Compare relational layers with gathering ones, within rounding, and with those of a saved graph, bit for bit."""
    workload, loop = draw(case, ("rgcn", "rgat")), Loop.drawn(case)
    expected = train(case, workload, loop, workload.build())
    model = workload.build()
    file = case.folder / "graph.safetensors"
    model.graph.save(file)
    model.graph = type(model.graph).load(file)
    compare(case, train(case, workload, loop, model), expected)
    from torch_geometric.nn import RGATConv, RGCNConv

    pyg, batch = {"rgcn": RGCNConv, "rgat": RGATConv}[workload.kind], workload.batches[0]
    layer = workload.build().first.double()
    relations = layer.num_relations
    other = pyg(16, case.drawn["width"], relations).double()
    other.load_state_dict(layer.state_dict())
    graph = model.graph
    for module in (layer, other):
        nodes = batch[0].double()
        (
            module(nodes, graph) if module is layer else module(nodes, graph.edge_index, graph.edge_type)
        ).square().mean().backward()
    for (name, parameter), two in zip(layer.named_parameters(), other.parameters(), strict=True):
        left = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        right = torch.zeros_like(two) if two.grad is None else two.grad
        case.figures["compared_bytes"] += left.nbytes
        if not torch.allclose(left, right, rtol=1e-9, atol=1e-12):
            case.found("wrong value", f"gradients of {name} differ by {(left - right).abs().max()} from PyG's")


def workers(case: Case) -> None:
    """Fork data-loader workers while storages are parked."""
    workload, loop = draw(case, ("mlp",)), Loop.drawn(case)
    expected = train(case, workload, loop, workload.build())
    model = workload.build()
    rows = torch.utils.data.TensorDataset(torch.arange(64))
    with everything_parked():
        offloader = offload.activations(
            model, budget=case.budget(disk=case.disk()), min_size=0, min_saving=0.0, max_stall=1.0, verify=True
        )
        loaders = [iter(torch.utils.data.DataLoader(rows, batch_size=8, num_workers=2)) for _ in range(1)]

        def before_backward() -> None:
            if case.choices.random() < 0.5:
                case.injected("fork of workers")
                loaders.append(iter(torch.utils.data.DataLoader(rows, batch_size=8, num_workers=1)))
                case.equal("rows of a worker", next(loaders[-1])[0], torch.arange(8))

        ours = train(case, workload, loop, model, around=lambda: offloader, before_backward=before_backward)
        loaders.clear()
        gc.collect()
        offloader.close()
    compare(case, ours, expected)


def quiet() -> None:
    """Ignore warnings that faults bring; turn SIGXFSZ into an error of the write."""
    warnings.simplefilter("ignore", PenstockWarning)
    warnings.filterwarnings("ignore", module="torch")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


__all__ = ["Faults", "Harm", "bits", "features", "offloaded", "planned", "quiet", "relational", "workers"]
