"""Models, batches and the plain loop of the campaign: what every room's result is compared with."""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.models import HuggingFace
from benchmarks.soak_case import Case
from penstock.relational import RelationalGraph, RGATConv, RGCNConv
from penstock.testing import GPT

Batch = tuple[torch.Tensor, ...]
KINDS = ("gpt", "mlp", "convnet", "lstm", "hugging face", "rgcn", "rgat")


@dataclass(frozen=True)
class Workload:
    """A model whose forward gives the loss, and its batches."""

    kind: str
    build: Callable[[], nn.Module]
    """The same parameters every time."""
    batches: Sequence[Batch]
    dtype: torch.dtype | None
    """The dtype of autocast."""

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return model(*batch)


class Mlp(nn.Module):
    """Blocks with a residual, each perhaps checkpointed, reentrantly or not."""

    def __init__(self, width: int, num_blocks: int, dropout: float, checkpoints: str):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpoints == "no":
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
        return functional.cross_entropy(self.head(x), y)


class ConvNet(nn.Module):
    """Convolutions with batch normalization."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, width), (width, width), (width, 2 * width)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.layers(x)), y)


class Recurrent(nn.Module):
    """Cells, unrolled in time; or PyTorch's fused layer."""

    def __init__(self, width: int, dropout: float, is_fused: bool):
        super().__init__()
        self.token, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.fused = nn.LSTM(width, width, batch_first=True) if is_fused else None
        self.cell = None if is_fused else nn.LSTMCell(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.token(x)
        if self.fused is not None:
            result, _ = self.fused(x)
        else:
            state = [torch.zeros(len(x), x.shape[2], dtype=x.dtype)] * 2
            steps = []
            for row in x.unbind(1):
                state = self.cell(self.dropout(row), tuple(state))
                steps.append(state[0])
            result = torch.stack(steps, dim=1)
        return functional.cross_entropy(self.head(self.dropout(result)).flatten(0, 1), y.flatten())


class Relational(nn.Module):
    """Two relational layers over one graph, which is no tensor of the batch."""

    def __init__(self, kind: str, graph: RelationalGraph, width: int, dropout: float):
        super().__init__()
        make = RGCNConv if kind == "rgcn" else RGATConv
        relations = graph.num_edge_types
        self.first, self.second = make(16, width, relations), make(width, 4, relations)
        self.dropout = nn.Dropout(dropout)
        self.graph = graph

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.first(x, self.graph)))
        return functional.cross_entropy(self.second(hidden, self.graph).float(), y)


def hugging_face(which: str, dropout: float) -> nn.Module:
    """Make a small model from a configuration."""
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    if which == "GPT-2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=64, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, use_cache=False,
        )  # fmt: skip
        return HuggingFace(transformers.GPT2LMHeadModel(config))
    config = transformers.BertConfig(
        **sizes, intermediate_size=64, vocab_size=64, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return HuggingFace(transformers.BertForMaskedLM(config))


def draw(case: Case, kinds: Sequence[str] = KINDS, *, checkpoints: bool = False, num_batches: int = 4) -> Workload:
    """Draw a model and its batches."""
    kind = case.draw("model", kinds)
    width, dropout = case.draw("width", (16, 32, 64)), case.draw("dropout", (0.0, 0.0, 0.1))
    size, seed = case.draw("batch", (3, 8, 32)), case.choices.randrange(2**30)
    dtype = case.draw("autocast", (None, None, torch.bfloat16)) if kind not in ("rgcn", "rgat") else None
    how = case.draw("checkpoints", ("no", "reentrant", "not reentrant")) if checkpoints else "no"
    generator = torch.Generator().manual_seed(seed)
    if kind in ("gpt", "lstm", "hugging face"):
        length = case.draw("length", (8, 24))
        vocabulary = 256 if kind == "gpt" else 64
        texts = [torch.randint(vocabulary, (size, length + 1), generator=generator) for _ in range(num_batches)]
        batches = [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]
        if kind == "gpt":
            layers = case.draw("layers", (1, 2, 4))
            make: Callable[[], nn.Module] = lambda: GPT(  # noqa: E731
                num_layers=layers, width=width, num_heads=2, context=32, checkpointed=how != "no"
            )
        elif kind == "lstm":
            is_fused = case.draw("fused", (True, False))
            make = lambda: Recurrent(width, dropout, is_fused)  # noqa: E731
        else:
            which = case.draw("which", ("GPT-2", "BERT"))
            make = lambda: hugging_face(which, dropout)  # noqa: E731
    else:
        rows = {"mlp": 16 * size, "convnet": size}.get(kind, 300)
        shape = (rows, 3, 12, 12) if kind == "convnet" else (rows, 16)
        batches = [
            (torch.randn(shape, generator=generator), torch.randint(4, (rows,), generator=generator))
            for _ in range(num_batches)
        ]
        if kind == "mlp":
            blocks = case.draw("blocks", (1, 3, 6))
            make = lambda: Mlp(width, blocks, dropout, how)  # noqa: E731
        elif kind == "convnet":
            make = lambda: ConvNet(width // 2, dropout)  # noqa: E731
        else:
            graph = relational_graph(rows, case.draw("edges", (0, 50, 2000)), generator)
            make = lambda: Relational(kind, graph, width, dropout)  # noqa: E731

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return Workload(kind=kind, build=build, batches=batches, dtype=dtype)


def relational_graph(num_nodes: int, num_edges: int, generator: torch.Generator) -> RelationalGraph:
    return RelationalGraph(
        torch.randint(num_nodes, (2, num_edges), generator=generator),
        torch.randint(5, (num_edges,), generator=generator), num_nodes=num_nodes, num_edge_types=5,
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


@dataclass
class Trained:
    """Results of a training."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Per step, by name."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """Options of the training loop."""

    num_steps: int
    accumulate: int
    optimizer: str
    keeps_gradients: bool
    """Zeroes them instead of dropping them."""

    @classmethod
    def drawn(cls, case: Case) -> "Loop":
        return cls(
            num_steps=case.draw("steps", (3, 5, 8)), accumulate=case.draw("accumulate", (1, 1, 3)),
            optimizer=case.draw("optimizer", tuple(OPTIMIZERS)), keeps_gradients=case.draw("keeps", (False, True)),
        )  # fmt: skip


def train(
    case: Case,
    workload: Workload,
    loop: Loop,
    model: nn.Module,
    *,
    step: Callable[[Batch], torch.Tensor] | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
    before_backward: Callable[[], None] = lambda: None,
    allowed: tuple[type[BaseException], ...] = (),
    failed: Callable[[BaseException], None] = lambda _: None,
    before_step: Callable[[int], None] = lambda _: None,
    seeds: bool = True,
) -> Trained:
    """Train in a plain loop. A step that raises one of ``allowed`` is repeated from where it began.

    ``seeds=False`` where the process's generator is somebody else's.
    """
    run, optimizer = Trained(), OPTIMIZERS[loop.optimizer](model.parameters())
    for parameter in model.parameters() if loop.keeps_gradients else ():
        parameter.grad = torch.zeros_like(parameter)
    step = step or (lambda batch: workload.loss(model, batch))
    for number in range(loop.num_steps):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        while True:
            optimizer.zero_grad(set_to_none=not loop.keeps_gradients)
            losses = []
            try:
                before_step(number)
                for micro in range(loop.accumulate):
                    if seeds:
                        torch.manual_seed(1000 * number + micro)
                    batch = workload.batches[(number + micro) % len(workload.batches)]
                    with around():
                        loss = step(batch)
                        before_backward()
                        (loss / loop.accumulate).backward()
                    losses.append(loss.detach().clone())
                    del loss
            except allowed as error:
                failed(error)
            else:
                break
            loss = None
            gc.collect()  # what the exception's frames hold would count against budgets
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
        run.losses += losses
        run.gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
        optimizer.step()
        case.figures["steps"] += 1
    run.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return run


def compare(case: Case, ours: Trained, expected: Trained) -> None:
    """Compare losses, gradients of every step, and the state at the end."""
    _ = (
        case.equal("losses", ours.losses, expected.losses)
        and case.equal("gradients", ours.gradients, expected.gradients)
        and case.equal("state", ours.state, expected.state)
    )
