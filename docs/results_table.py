"""The tables of `docs/benchmarks.md`, made from the dated files of `benchmarks/results`.

python docs/results_table.py

writes them between the page's marks. A test compares page and files, so that they cannot drift apart.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
MISUSE_MARKS = ("<!-- misuse: python docs/results_table.py -->", "<!-- end of misuse -->")
REAL_PAGE = ROOT / "docs" / "recipes" / "real-models.md"
MARKS = ("<!-- results: python docs/results_table.py -->", "<!-- end of results -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of a file, in words: the value of a row, or the lowest and highest of several."""

    label: str
    """What it is, with ``{}`` for the number."""
    metric: str
    """Regular expression for the whole metric of its rows."""
    name: str = ".*"
    """The same for their names."""
    peer: str = ".*"
    """The same for their peers."""
    of: str = "ratio"
    """``"ratio"`` or ``"value"``."""
    form: str = ".2f"
    """How numbers are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file: what it shows, and the command that made it."""

    shows: str
    """One sentence."""
    command: str
    """After ``python -m benchmarks.``."""
    figures: tuple[Figure, ...]
    """What is quoted."""


_PLAIN, _BESIDE = "2 plain trainings side by side", "2 plain trainings side by side, each beside as many bytes moved"


def _training(command: str, shows: str) -> Entry:
    over = "throughput over a peer's"
    figures = (
        Figure(
            label="{} of the throughput of two plain trainings in parallel, which need the memory",
            metric=over,
            peer=_PLAIN,
        ),
        Figure(label="{} of the same two while each moves as many bytes", metric=over, peer=_BESIDE),
        Figure(label="{} of FSDP2 with CPU offload", metric=over, peer="FSDP2.*"),
        Figure(label="computing {} of the time", metric="useful computation", of="value", form=".1%"),
    )
    return Entry(shows=shows, command=f"fleet_training {command}", figures=figures)


def _time_of_a_fleet(shows: str) -> Entry:
    figures = (
        Figure(label="plain trainings would take {}", metric="plain trainings would take", of="value", form=".1%"),
        Figure(label="as many bytes moved: {}", metric="as many bytes.*", of="value", form=".1%"),
        Figure(label="page faults in units: {}", metric="of the system.*", of="value", form=".1%"),
        Figure(label="checkpoints: {}", metric="checkpoints are written", of="value", form=".1%"),
    )
    return Entry(shows=shows, command="fleet_table --host 10GiB", figures=figures)


def _equality(command: str) -> Entry:
    equal = Figure(label="equal: {}", metric="losses equal to plain training", of="value", form="")
    peak = Figure(label="measured peak {} of the budget", metric="measured peak over budget", of="value", form=".4f")
    shows = "Losses of a fleet are bit-identical to plain training"
    return Entry(shows=shows, command=f"fleet_training --part equality {command}".rstrip(), figures=(equal, peak))


def _relational(command: str) -> Entry:
    def times(layer: str, peer: str, metric: str, what: str) -> Figure:
        label = f"PyG's {peer}, {what}: {{}} times ours"
        return Figure(label=label, name=f"{layer} .*", peer=peer, metric=metric, form=".1f")

    figures = (
        times("RGCN", "RGCNConv", "training", "training step"),
        times("RGCN", "RGCNConv", "training peak", "peak"),
        times("RGAT", "RGATConv", "training", "training step"),
        times("RGAT", "RGATConv", "training peak", "peak"),
    )
    return Entry(
        shows="Relational layers compared with PyG's, DGL's and hand-written PyTorch", command=command, figures=figures
    )


def _real(command: str, shows: str, *figures: Figure) -> Entry:
    equal = Figure(label="losses equal: {}", metric="losses equal to plain's", of="value", form="d")
    return Entry(shows=shows, command=f"real_models {command}", figures=(*figures, equal))


def _real_training(share: str) -> tuple[Figure, ...]:
    """Return the figures of a model within a share of plain PyTorch's peak."""
    way = f".*training: training.*{re.escape(share)} of plain's peak"
    return (
        Figure(label=f"{{}} of plain training's peak within {share}", name=way, metric="peak"),
        Figure(label="processor time {} of plain training's", name=way, metric="processor time"),
    )


def _beside_checkpoints(way: str) -> tuple[Figure, ...]:
    """Return the figures of activations that leave the device."""
    return (
        Figure(label="step {} of plain training's", name=way, metric="step time"),
        Figure(label="activations {} of plain training's", name=way, metric="activation peak", form=".1%"),
        Figure(label="checkpoint per block: step {}", name="checkpoint", metric="step time"),
        Figure(label="activations {}", name="checkpoint", metric="activation peak", form=".1%"),
    )


_LOOP = (
    Figure(label="plain training was killed under the smallest cap: {}", metric="died", of="value", form="d"),
    Figure(label="losses equal: {}", name="(?!DeepSpeed).*", metric="losses equal to plain's", of="value", form="d"),
    Figure(
        label="step over plain training's without a cap: {} with a state of 2 times the cap",
        name="Penstock, state 2 x.*",
        metric="step",
    ),
    Figure(label="{} with 4 times", name="Penstock, state 4 x.*", metric="step"),
)


ENTRIES = {
    "cpu-offload": Entry(
        shows="Activations offloaded to disk, compared with plain training and checkpoints",
        command="offload",
        figures=_beside_checkpoints("Penstock to disk"),
    ),
    "modelled": Entry(
        shows="The papers' workloads, planned for machines from their data sheets; nothing here is measured",
        command="modelled --only ssdtrain --only hydra",
        figures=(
            Figure(
                label="activation peak {} on SSDTrain's machine",
                metric="SSDTrain: activation peak",
                name=".*a100-40gb-optane",
                of="value",
                form=".0%",
            ),
            Figure(label="{} of the saving of the best schedule", metric="SSDTrain: activation peak"),
            Figure(label="{} of naive model parallelism's rate", metric="Hydra: over model parallelism", of="value"),
        ),
    ),
    "gpu-h100": Entry(
        shows="On one H100: activations offloaded to host memory, plans, relational layers and rows read in place",
        command="gpu --phase 2 --phase 3 --phase 5",
        figures=(
            *_beside_checkpoints("offload"),
            Figure(label="PyG's training step takes {} times as long as ours", metric="training step", form=".1f"),
            Figure(
                label="plans: measured peak {} of the budget",
                metric="measured peak over budget",
                of="value",
                form=".4f",
            ),
        ),
    ),
    "gpu-h200": Entry(
        shows="On one H200: 1.2 billion parameters within a quarter of their state, and rows read in place",
        command="gpu --phase 2 --phase 6",
        figures=(
            Figure(
                label="step over that of FSDP2 with CPU offload, with updates in backward: {}",
                name=".*25.0% of the state, update_in_backward=True",
                metric="step time over FSDP2's",
            ),
            Figure(label="measured peak {} of the budget", metric="peak over budget", of="value", form=".3f"),
            Figure(
                label="rate of rows read in place over rows gathered by the host: {}", metric="rate", peer="gathered.*",
            ),
        ),
    ),
    "gpu-overlap": Entry(
        shows="On H100s: 1.2 and 2.4 billion parameters within a quarter of their state, before and after copies in "
        "and out ran at the same time",
        command="gpu --phase 6",
        figures=(
            Figure(label="width 4096: {} of the time before", name="2.4B.*after, four.*", metric="step time"),
            Figure(label="width 2048: {} of it", name="1.2B.*in backward, after.*", metric="step time"),
            Figure(label="updates on the host: {}", name="1.2B.*on the host, after.*", metric="step time"),
        ),
    ),
    "cpu-advisor": Entry(
        shows="What `advise` picks and predicts, compared with training with every option",
        command="advisor --scale 0.6",
        figures=(
            Figure(label="regret {}", metric="regret of the pick", of="value", form=".1%"),
            Figure(
                label="predicted peak {} of the measured one",
                metric="predicted peak over measured", of="value", form=".4f",
            ),
            Figure(
                label="predicted ratio {} of the measured one",
                metric="predicted ratio to plain over measured", of="value",
            ),
        ),
    ),
    "cpu-training": Entry(
        shows="Parameters, gradients and Adam's state of 583 MiB under hard caps, in your own loop",
        command="training --rounds 3 --tokens 1024",
        figures=_LOOP,
    ),
    "cpu-training-large": Entry(
        shows="The same with 2.5 GiB",
        command="training --rounds 2 --layers 24 --width 768 --tokens 512",
        figures=(
            *_LOOP,
            Figure(label="{} with 8 times", name="Penstock, state 8 x.*", metric="step"),
            Figure(label="{} with 8 times and updates in backward", name="in backward, state 8 x.*", metric="step"),
        ),
    ),
    "cpu-training-deepspeed": Entry(
        shows="583 MiB of state at 4,096 tokens a step, with DeepSpeed ZeRO-3 and NVMe as a peer",
        command="training --rounds 3 --tokens 4096",
        figures=(*_LOOP, Figure(label="DeepSpeed {}, without a cap", name="DeepSpeed.*", metric="step")),
    ),
    "sim-training-bytes": Entry(
        shows="Bytes copied per parameter and step in such a loop and in a fleet of one, with AdamW, counted on the "
        "simulated device",
        command="training_bytes",
        figures=tuple(
            Figure(label=f"{way}: {{}}", name=f"{name}, budget 9%.*", metric="total", of="value", form=".1f")
            for way, name in (
                ("within 9% of the state", "as it is"),
                ("with clipping", "clipped"),
                ("with updates in backward", "in backward"),
                ("in a fleet, on the host, bfloat16, clipped", "fleet, on the host, bfloat16, clipped"),
            )
        ),
    ),
    "cpu-training-zoo": Entry(
        shows="Architectures of three libraries train in such a loop as they do in plain PyTorch",
        command="training_zoo",
        figures=(
            Figure(label="bit-identical: {}", metric="equal to plain", of="value", form="d"),
            Figure(label="measured peak {} of the budget", metric="measured over budget", of="value", form=".3f"),
        ),
    ),
    "cpu-training-matrix": Entry(
        shows="Architectures of transformers, trained in six ways for 20 steps, also through the Trainer",
        command="training_matrix",
        figures=(
            Figure(label="bit-identical in {} of the cases", metric="equal to plain", of="value", form=".0%"),
            Figure(
                label="budgets {} of plain training's peak", metric="budget over plain's peak", of="value", form=".2f",
            ),
        ),
    ),
    "modelled-training": Entry(
        shows="7.6 billion parameters within 22 GiB, for machines from their data sheets; nothing here is measured",
        command="modelled_training",
        figures=(
            Figure(
                label="{} of the rate of the computation alone at 4,096 tokens",
                name="casts.* 4096 .*", metric="modelled",
            ),
            Figure(label="{} at 16,384", name="casts.* 16384 .*", metric="modelled"),
        ),
    ),
    "cpu-training-faults": Entry(
        shows="Such a loop while writes and reads of its disk fail at random",
        command="training_faults",
        figures=tuple(
            Figure(label=f"{{}} {name}", metric=name, of="value", form=",d") for name in ("trials", "faults", "wrong")
        ),
    ),
    "cpu-training-host": Entry(
        shows="How long the host takes per operator inside such a loop and for updates, and which operators a step has",
        command="training_host",
        figures=(
            Figure(
                label="{} us for an operator on a page",
                name="on a page.*", metric="a training", of="value", form=".0f",
            ),
            Figure(label="{} for a view", name="a view.*", metric="a training", of="value", form=".0f"),
            Figure(label="{} under a mode that does nothing", metric="an empty mode", of="value", form=".0f"),
            Figure(
                label="an update on the host in one pass: {} of the time of PyTorch's kernels",
                name="an update.*", metric="one pass", of="ratio", form=".2f",
            ),
        ),
    ),
    "cpu-training-parts": Entry(
        shows="Steps of a GPT, a Llama and a ViT within a share of their state and 24 MiB, over plain steps",
        command="training_parts",
        figures=tuple(
            Figure(label=f"{{}} {way}, {label}", name=rf".*, {share} of the state, {way}", metric="step")
            for share, label in (("0.25", "a quarter"), ("0.125", "an eighth"))
            for way in ("planned", "operator by operator", "fleet of one")
        ),
    ),
    "cpu-training-kills": Entry(
        shows="Such a loop in processes that are killed while they train and save",
        command="training_kills",
        figures=tuple(
            Figure(label=f"{{}} {name}", metric=name, of="value", form=",d")
            for name in ("kills", "kills while saving", "wrong")
        ),
    ),
    "cpu-real-gpt2": _real(
        "--model gpt2 --rounds 3",
        "GPT-2 124M from its configuration: activations beside a checkpoint per block, and training within a budget",
        Figure(
            label="peak of checkpoint: {} of plain training's",
            name="gpt2, activations: checkpoint", metric="peak",
        ),
        *_real_training("0.5"),
    ),
    "cpu-real-llama": _real(
        "--model llama --rounds 2",
        "A Llama of 201 million parameters from its configuration, within a budget",
        *_real_training("0.5"),
    ),
    "cpu-real-vit": _real(
        "--model vit --rounds 2",
        "ViT-B/16 from its configuration: activations beside a checkpoint per block, and training within a budget",
        *_real_training("0.5"),
    ),
    "cpu-real-llama-1b": Entry(
        shows="A Llama of 1.1 billion parameters within 3 GiB, with its state on a disk",
        command="real_models --model llama-1b --rounds 1 --steps 1",
        figures=(
            Figure(
                label="step {} of the computation alone, extrapolated",
                metric="step over the computation", of="value",
            ),
            Figure(
                label="{} of the time that its bytes take on the disk, one direction at a time",
                metric="step over the bytes, one direction at a time", of="value",
            ),
        ),
    ),
    "cpu-soak": Entry(
        shows="Random models, budgets, combinations of rooms and faults, each compared with plain PyTorch",
        command="soak",
        figures=(
            Figure(label="{} hours", metric="duration", of="value"),
            Figure(label="{} cases", name="soak", metric="cases", of="value", form=",d"),
            Figure(label="{} bytes compared", metric="compared_bytes", of="value", form=",d"),
            Figure(label="{} wrong values", metric="findings: wrong value", of="value", form="d"),
            Figure(label="{} leaks", metric="findings: leak", of="value", form="d"),
            Figure(label="{} hangs", metric="findings: hang", of="value", form="d"),
            Figure(label="{} crashes", metric="findings: crash", of="value", form="d"),
            Figure(label="{} undocumented errors", metric="findings: undocumented error", of="value", form="d"),
            Figure(label="{} budgets exceeded", metric="findings: over budget", of="value", form="d"),
            Figure(label="{} named budgets that did not work", metric="findings: budget", of="value", form="d"),
            Figure(label="{} writes outside", metric="findings: outside", of="value", form="d"),
        ),
    ),
    "cpu-fuzz": Entry(
        shows="Damaged and hostile files of every format that Penstock reads",
        command="fuzz",
        figures=(
            Figure(label="{} cases", name="fuzz", metric="cases", of="value", form=",d"),
            Figure(label="{} crashes", metric="findings: crash", of="value", form="d"),
            Figure(label="{} hangs", metric="findings: hang", of="value", form="d"),
            Figure(label="{} files whose code ran", metric="findings: executed", of="value", form="d"),
        ),
    ),
    "cpu-misuse": Entry(
        shows="Misuse of every public function and class: wrong arguments, order, threads, forks, copies, sharing",
        command="misuse",
        figures=(
            Figure(label="{} cases", name="misuse", metric="cases", of="value", form=",d"),
            Figure(label="{} right", name="misuse", metric="right", of="value", form=",d"),
            Figure(label="{} errors that name the argument", name="misuse", metric="our error", of="value", form=",d"),
            Figure(label="{} errors raised by PyTorch", name="misuse", metric="their error", of="value", form=",d"),
            Figure(label="{} raw", name="misuse", metric="raw", of="value", form=",d"),
            Figure(label="{} silent", name="misuse", metric="silent", of="value", form=",d"),
            Figure(label="{} wrong numbers", name="misuse", metric="wrong number", of="value", form="d"),
            Figure(label="{} leaks", name="misuse", metric="leak", of="value", form="d"),
            Figure(label="{} crashes", name="misuse", metric="crash", of="value", form="d"),
            Figure(label="{} hangs", name="misuse", metric="hang", of="value", form="d"),
        ),
    ),
    "cpu-soak-tiers": Entry(
        shows="Tiers under random faults: full, failing, short, corrupt",
        command="soak_tiers",
        figures=(
            Figure(label="{} cycles", metric="num_cycles", of="value", form=",d"),
            Figure(label="{} wrong", metric="num_wrong", of="value", form="d"),
            Figure(label="{} leaked files", metric="num_leaked_files", of="value", form="d"),
        ),
    ),
    "cpu-shapes": Entry(
        shows="A batch of another size is planned from the profile of the first",
        command="shapes",
        figures=(
            Figure(label="measured peak {} of the predicted one", metric="peak", of="value", form=".3f"),
            Figure(label="median predicted time {} of the measured one", name="median", metric="time", of="value"),
            Figure(label="median planning time {} s", name="median", metric="plan_s", of="value", form=".3f"),
        ),
    ),
    "cpu-strange": Entry(
        shows="Models that are not a single graph train as in eager PyTorch, through both doors",
        command="strange",
        figures=(
            Figure(label="bit-identical: {}", metric="equal to eager.*", of="value", form=".0f"),
            Figure(label="measured peak {} of the budget", metric="measured over budget.*", of="value", form=".3f"),
        ),
    ),
    "cpu-coverage": Entry(
        shows="Architectures of five libraries train through every door as in plain PyTorch",
        command="coverage",
        figures=(
            Figure(label="bit-identical: {} per door", metric="equal", of="value", form="d"),
            Figure(label="not equal: {}", metric="not equal", of="value", form="d"),
        ),
    ),
    "cpu-loops": Entry(
        shows="Training loops as people write them, and public optimizers, through every door as in plain PyTorch",
        command="loops",
        figures=(
            Figure(label="equal: {} per door", metric="equal", of="value", form="d"),
            Figure(label="different: {}", metric="DIFFERENT", of="value", form="d"),
            Figure(label="crashes: {}", metric="CRASH", of="value", form="d"),
        ),
    ),
    "cpu-remat": Entry(
        shows="Planned steps of nine models keep budgets; compared with checkpoints and `activation_memory_budget`",
        command="remat",
        figures=(
            Figure(label="measured peak over budget: {}", metric="measured over budget.*", of="value", form=".4f"),
            Figure(
                label="measured peak over predicted peak: {}",
                metric="measured over predicted.*", of="value", form=".4f",
            ),
        ),
    ),
    "cpu-planning": Entry(
        shows="The time of planning architectures of model libraries, with capture and profile",
        command="planning",
        figures=(
            Figure(label="{} architectures", metric="planned", of="value", form=".0f"),
            Figure(label="median {} s", metric="median planning", of="value"),
            Figure(label="at most {} s", metric="longest planning", of="value", form=".1f"),
        ),
    ),
    "cpu-planner": Entry(
        shows="Plans compared with optima, with a lower bound, and with a checkpoint per block",
        command="planner",
        figures=(
            Figure(
                label="recompute: step over the optimum's: {}", name="recompute",
                metric="step over the optimum's, mean", of="value", form=".3f",
            ),
            Figure(
                label="hybrid: {}", name="hybrid", metric="step over the optimum's, mean", of="value", form=".3f",
            ),
            Figure(
                label="13,822 operators, hybrid: step over the bound's at most {}", name="hybrid, 20 budgets",
                metric="step over the bound's, worst", of="value", form=".3f",
            ),
            Figure(
                label="extra time at a checkpoint's peak: {}", name="recompute", metric="extra time at 64.4 MiB",
                of="value", form=".1%",
            ),
            Figure(label="the checkpoint's own: {}", name="checkpoint.*", metric="extra time", of="value", form=".1%"),
        ),
    ),
    "cpu-fleet-simulated": Entry(
        shows="Schedulers on a virtual clock: 12 jobs on 8 devices",
        command="fleet",
        figures=(
            Figure(label="fifo takes {} times as long", name="scheduler fifo", metric="makespan, a link.*"),
            Figure(label="always recomputing: {} times", name="always recompute.*", metric="makespan, a link.*"),
            Figure(label="model parallelism: {} times", name="model parallelism", metric="makespan, a link.*"),
        ),
    ),
    "cpu-fleet": Entry(
        shows="Twelve models, each four times as large as the budget, with a disk below the devices",
        command="fleet_training --layers 16 --width 384 --steps 6",
        figures=(
            Figure(label="{} of the throughput of two plain trainings in parallel", metric="throughput", peer=_PLAIN),
            Figure(label="{} of the same two while each moves as many bytes", metric="the same", peer=_BESIDE),
            Figure(label="computing {} of the time", metric="useful computation", of="value", form=".1%"),
        ),
    ),
    "cpu-fleet-host": _training(
        "--part rounds --host 10GiB", "The same with models of 8 x 768 and host memory below the devices"
    ),
    "cpu-fleet-disk": _training("--part rounds", "The same with models of 8 x 768 and only a disk below the devices"),
    "cpu-fleet-table": _time_of_a_fleet("Where the time of a fleet's devices goes, with host memory below them"),
    "cpu-fleet-table-huge": _time_of_a_fleet("The same where PyTorch takes huge pages, THP_MEM_ALLOC_ENABLE=1"),
    "cpu-fleet-vit": _training("--part rounds --model vit", "The same with a ViT of 8 x 768"),
    "cpu-fleet-ablations": Entry(
        shows="What double buffering, SHARP, and offloading instead of recomputing gain",
        command="fleet_training --part ablations",
        figures=(
            Figure(
                label="without double buffering: {} of the throughput with all of them",
                name="no double buffer", metric="throughput",
            ),
            Figure(label="without SHARP: {}", name="no SHARP", metric="throughput"),
            Figure(label="always recomputing: {}", name="always recompute.*", metric="throughput"),
        ),
    ),
    "cpu-fleet-scaling": Entry(
        shows="Scaling over the number of jobs, the number of devices and the model size",
        command="fleet_training --part scaling --layers 16 --width 384 --steps 8",
        figures=(
            Figure(label="computing {} of the time", metric="useful computation", of="value", form=".1%"),
        ),
    ),
    "cpu-fleet-equality": _equality("--layers 12"),
    "cpu-fleet-equality-vit": _equality("--model vit"),
    "cpu-fleet-faults": Entry(
        shows="Kills, exceptions, NaNs, full tiers and full disks, each followed by a resume",
        command="fleet_faults",
        figures=(
            Figure(label="{} faults of each kind", metric="faults", of="value", form="d"),
            Figure(label="{} trials with something wrong", metric="trials with something wrong", of="value", form="d"),
        ),
    ),
    "cpu-relational": _relational("relational --part peers --width 64"),
    "cpu-relational-keep": dataclasses.replace(
        _relational("relational --part peers --width 64"),
        shows="The same where malloc keeps freed memory (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`)",
    ),
    "cpu-relational-variants": Entry(
        shows="RGCN's training step by where products are taken, and whether they are stored",
        command="relational --part variants",
        figures=(
            Figure(label="FB15k-237: {} products", name=".* FB15k-237", metric="products of the cover", of="value",
                   form=",.0f"),
            Figure(label="instead of {}", name=".* FB15k-237", metric="products at the better end", of="value",
                   form=",.0f"),
            Figure(label="the choice over the fastest: {}", metric="chosen over the fastest", of="value"),
        ),
    ),
    "cpu-relational-products": Entry(
        shows="Products of rows with the matrix of their type, beside PyTorch's batched products",
        command="relational --part products",
        figures=(
            Figure(label="64 x 64, 256 rows a type: {} of PyTorch's rate", name="products 64 x 64, 256 rows",
                   metric="product, of PyTorch's"),
            Figure(label="transposed: {}", name="products 64 x 64, 256 rows", metric="transposed, of PyTorch's"),
            Figure(label="outer: {}", name="products 64 x 64, 256 rows", metric="outer, of PyTorch's"),
        ),
    ),
    "cpu-relational-lookups": Entry(
        shows="Rows that edges look up, in traversals and in `embedding_bag`",
        command="relational --part lookups",
        figures=(
            Figure(label="sums of rows: {} of embedding_bag's rate", name="lookups .*", metric="sum"),
            Figure(label="rows in bfloat16, embedding_bag: {} times as many a second as in float32", name="lookups .*",
                   metric="bfloat16's rate of rows over float32's"),
        ),
    ),
    "cpu-relational-stream": Entry(
        shows="Relational layers on edges in a file, under a hard cap",
        command="relational_stream",
        figures=(
            Figure(
                label="two layers of RGCN: {} of the step in memory", name="RGCN, 2 layers", metric="step", form=".1f"
            ),
            Figure(label="RGAT: {}", name="RGAT, 2 layers", metric="step", form=".1f"),
            Figure(label="HGT: {}", name="HGT, 2 layers", metric="step", form=".1f"),
            Figure(label="its memory: {}", name="HGT, 2 layers", metric="memory"),
        ),
    ),
    "cpu-relational-width32": _relational("relational --width 32"),
    "cpu-relational-width128": _relational("relational --width 128"),
    "cpu-relational-first": Entry(
        shows="From index tensors to gradients, in a first process and in the next",
        command="relational --part first --part blocks",
        figures=(
            Figure(label="first process {} s", name=".*first process", metric="first call", of="value"),
            Figure(label="next process {} s", name=".*next process", metric="first call", of="value"),
        ),
    ),
    "cpu-unified-rows": Entry(
        shows="Random rows from a file and from memory",
        command="unified --part gather --part disk --part cache --part depth --rounds 7 --file-bytes 1073741824",
        figures=tuple(
            Figure(label=label, name=".*cold cache", metric="ours over a peer's rate", peer=peer, form=".1f")
            for label, peer in (
                ("cold cache: {} times the rate of a C probe", "C probe.*"),
                ("{} times memmap with MADV_RANDOM", "numpy.memmap, MADV_RANDOM"),
                ("{} times plain memmap", "numpy.memmap"),
            )
        )
        + (
            Figure(
                label="in the page cache: {} of the time of a map",
                name="100% cached.*", metric="our time over a peer's", peer="numpy's map",
            ),
        ),
    ),
    "cpu-unified-gather": Entry(
        shows="Random rows from memory",
        command="unified --part gather --rounds 25",
        figures=(
            Figure(
                label="rows that differ from call to call: {} times as fast as index_select",
                name=".*(uniform|power law)", metric="index_select's time over ours",
            ),
            Figure(
                label="rows in the cache: {}", name=".*the same rows again", metric="index_select's time over ours",
            ),
        ),
    ),
    "cpu-unified-ranks": Entry(
        shows="Ranks of one machine that share one table of features",
        command="unified_ranks --rounds 5",
        figures=(
            Figure(
                label="2 ranks: {} of the memory of one process",
                name="2 ranks together", metric="memory.*", peer="1 process",
            ),
            Figure(label="4 ranks: {}", name="4 ranks together", metric="memory.*", peer="1 process"),
            Figure(
                label="rows in memory, each of 2 ranks: {} of one process",
                name="2 ranks together", metric="held rows, of each rank", peer="1 process",
            ),
            Figure(
                label="rows on the disk, 2 and 4 ranks together: {} of one process",
                name=". ranks together", metric="rows from the disk.*", peer="1 process",
            ),
        ),
    ),
    "cpu-unified-peers": Entry(
        shows="Machines that hold one table together, as processes of one machine",
        command="unified_peers",
        figures=tuple(
            Figure(
                label=f"{count} machines: {{}} times the rows a second of machines that ask nobody",
                name=f"{count} machines, planned", metric="rows read by a machine", peer=".*own",
            )
            for count in (2, 3, 4)
        ),
    ),
    "modelled-unified-peers": Entry(
        shows="The same for 8 to 64 machines, from data sheets; nothing here is measured",
        command="unified_peers --model",
        figures=(
            Figure(
                label="64 machines, memory for 1/16 each, 100 Gbit/s: {} times as fast as a split without copies",
                name="64 machines, memory for 1/16 each, 100.*", metric="rows read by a machine", peer="split",
            ),
            Figure(
                label="as fast as each for itself: {} times",
                name="64 machines, memory for 1/16 each, 100.*", metric="rows read by a machine", peer="own",
                form=".1f",
            ),
        ),
    ),
    "modelled-state-plans": Entry(
        shows="Planned steps of models larger than the device, simulated on a modelled H100; nothing is measured",
        command="state_plans",
        figures=(
            Figure(
                label="a quarter of the state on the device, exact: {} of a plain step", metric="step",
                name=r"(1\.2|2\.4)B: updates in backward, exact",
            ),
            Figure(
                label="updates split with host memory of 122 GB/s: {}", metric="step",
                name=r"(1\.2|2\.4)B: updates in backward, host memory 122 GB/s",
            ),
            Figure(
                label="of 200 GB/s: {}", metric="step",
                name=r"(1\.2|2\.4)B: updates in backward, host memory 200 GB/s",
            ),
        ),
    ),
    "cpu-unified-faults": Entry(
        shows="Faults of ranks, disks and messages against tables that ranks and machines share",
        command="unified_faults",
        figures=(
            Figure(label="{} trials", name="all", metric="trials", of="value", form=".0f"),
            Figure(label="{} faults", name="all", metric="faults", of="value", form=".0f"),
            Figure(label="{} wrong", name="all", metric="trials with something wrong", of="value", form=".0f"),
        ),
    ),
    "cpu-unified-infer": Entry(
        shows="Outputs of GraphSAGE for a million nodes, layer by layer",
        command="unified_infer",
        figures=(
            Figure(
                label="a loader that takes all neighbors takes {} times as long",
                name="loader", metric="time.*", form=".1f",
            ),
        ),
    ),
    "cpu-unified-graph": Entry(
        shows="A graph of a billion edges in a file",
        command="unified_graph --edges 1000000000 --rounds 4 --warm",
        figures=(
            Figure(label="written in {} s", name="write", metric="time", of="value", form=".0f"),
            Figure(
                label="sampled from a cold file: {} of the time without asking for pages", name="cold",
                metric="time of a mini-batch",
            ),
            Figure(label="from a cached file: {} of the time in memory", name="warm", metric="time of a mini-batch"),
        ),
    ),
    "cpu-unified-epochs": Entry(
        shows="Epochs of GraphSAGE over tiered features, compared with all rows in memory",
        command="unified --part epochs --nodes 1048576 --epochs 3",
        figures=(
            Figure(
                label="epoch with a sixteenth of the bytes in memory: {}",
                name="1/16.*", metric="epoch over all in memory",
            ),
            Figure(label="with a quarter: {}", name="1/4.*", metric="epoch over all in memory"),
            Figure(label="waiting {} of the epoch", name="1/.*", metric="stall share", of="value", form=".1%"),
        ),
    ),
}  # fmt: skip
"""By name of a file without its date, in the order of the table."""


def table() -> str:
    """Return the table as Markdown. Raises ``ValueError`` for a file without an entry, or figures that it lacks."""
    rows = ["| date | what it shows | figures | command |", "|---|---|---|---|"]
    files = sorted(RESULTS.glob("20??-??-??-*.json"))
    for file in files:
        if file.stem[11:] not in ENTRIES:
            raise ValueError(f"{file.name} has no entry: say in {Path(__file__).name} what it shows")
    order = list(ENTRIES)
    for file in sorted(files, key=lambda path: (order.index(path.stem[11:]), path.stem)):
        entry = ENTRIES[file.stem[11:]]
        content = json.loads(file.read_text())
        shown = "; ".join(_figure(figure, content["rows"], file) for figure in entry.figures)
        link = f"[{file.stem[:10]}](../benchmarks/results/{file.name})"
        rows.append(f"| {link} | {entry.shows} | {shown} | `python -m benchmarks.{entry.command}` |")
    return "\n".join(rows)


def misuse_table() -> str:
    """Return the table of outcomes of misuse by room, from the last file of that campaign."""
    kinds = ["cases", "right", "our error", "their error", "raw", "silent", "wrong number", "leak", "crash", "hang"]
    file = max(RESULTS.glob("20??-??-??-cpu-misuse.json"))
    counts: dict[str, dict[str, int]] = {}
    for row in json.loads(file.read_text())["rows"]:
        counts.setdefault(row["name"], {})[row["metric"]] = row["value"]
    rows = [f"| room | {' | '.join(kinds)} |", f"|---{'|---:' * len(kinds)}|"]
    for name, of_room in counts.items():
        shown = " | ".join(format(of_room[kind], ",d") for kind in kinds)
        rows.append(f"| {'all' if name == 'misuse' else name} | {shown} |")
    return "\n".join(rows)


def real_tables() -> dict[str, str]:
    """What fits into which budget: by model, from the last file of `benchmarks.real_models` for each."""
    files = {file.stem[11:].removeprefix("cpu-real-"): file for file in sorted(RESULTS.glob("*-cpu-real-*.json"))}
    del files["llama-1b"]  # not compared with plain PyTorch
    return {model: _real_table(json.loads(file.read_text())["rows"]) for model, file in files.items()}


def _real_table(rows: list[dict[str, Any]]) -> str:
    ways: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if ": " in row["name"]:
            ways.setdefault(row["name"].split(", ", 1)[1], {})[row["metric"]] = row
    lines: list[str] = []
    group = ""
    for name, of in ways.items():
        if name.split(": ")[0] != group:
            group = name.split(": ")[0]
            head = ["method", "budget", "peak", "step, x plain", "processor time, x plain"]
            head += ["copied in", "copied out", "losses equal"]
            lines += ["", f"| {group}: {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        cells = [name.split(": ", 1)[1], _mib(of.get("budget"))]
        if "failed" in of:
            needed = re.search(r"at least (\d+)", of["failed"]["peer"])
            reason = f"needs at least {int(needed[1]) / 2**20:,.0f} MiB" if needed else "error"
            lines.append(f"| {' | '.join([*cells, reason, '', '', '', '', ''])} |")
            continue
        cells.append(_mib(of["peak"]))
        for metric in ("step", "processor time"):
            ratio = of[metric]["ratio"]
            low, high = (of.get(f"{metric} ratio, {end}", {"value": ratio})["value"] for end in ("low", "high"))
            cells.append(
                "1" if ratio is None else f"{ratio:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low != high else "")
            )
        cells += [_mib(of.get(way)) for way in ("in", "out")]
        cells.append("yes" if of["losses equal to plain's"]["value"] else "**no**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def _mib(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['value'] / 2**20:,.0f} MiB"


def _figure(figure: Figure, rows: list[dict[str, Any]], file: Path) -> str:
    wanted = {"metric": figure.metric, "name": figure.name, "peer": figure.peer}
    result = [row for row in rows if all(re.fullmatch(pattern, row[key]) for key, pattern in wanted.items())]
    values = [row[figure.of] for row in result if row[figure.of] is not None]
    if not values:
        raise ValueError(f"{file.name} has no row for {figure}")
    ends = list(dict.fromkeys(_written(number, figure.form) for number in (min(values), max(values))))
    return figure.label.format(" to ".join(ends))


def _written(value: float | bool, form: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(int(value) if form.endswith("d") else value, form)


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}")
    for model, tables in real_tables().items():
        mark, end = f"<!-- real {model}: python docs/results_table.py -->", f"<!-- end of real {model} -->"
        before, _, rest = REAL_PAGE.read_text().partition(mark)
        REAL_PAGE.write_text(f"{before}{mark}\n\n{tables}\n\n{end}{rest.partition(end)[2]}")
    before, _, rest = PAGE.read_text().partition(MISUSE_MARKS[0])
    after = rest.partition(MISUSE_MARKS[1])[2]
    PAGE.write_text(f"{before}{MISUSE_MARKS[0]}\n\n{misuse_table()}\n\n{MISUSE_MARKS[1]}{after}")


if __name__ == "__main__":
    main()
