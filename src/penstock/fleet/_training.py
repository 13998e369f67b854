"""A job in training: its model in groups, its batches, and its optimizer, on any device.

Nothing here decides when or where it runs. The worker of a device does (`_worker.py`). Between mini-batches all of the
job is in its groups, gradients and optimizer states, which move from device to device as items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.fleet._batch import Structure
from penstock.fleet._cuts import Cuts, Cuttable
from penstock.fleet._feed import Feed, Position
from penstock.fleet._groups import Group, group, pack, packed_layouts
from penstock.fleet._handed import own_model
from penstock.fleet._job import Job, Update
from penstock.fleet._memory import Item
from penstock.fleet._optimizer import ShardedOptimizer
from penstock.fleet._packed import Packed
from penstock.fleet._program import ShardProgram
from penstock.fleet._random import Randomness
from penstock.fleet._weights import Weights
from penstock.stepping import State
from penstock.storages import storage_id


@dataclass(slots=True)
class Scale:
    """Loss scaling for float16, as ``torch.amp.GradScaler`` does it."""

    value: float = 65536.0
    num_good: int = 0

    def update(self, is_finite: bool) -> None:
        """Update the scale after a step, or after one that had to be skipped."""
        if not is_finite:
            self.value, self.num_good = self.value * 0.5, 0
        else:
            self.num_good += 1
            if self.num_good == 2000:
                self.value, self.num_good = self.value * 2.0, 0


class JobTraining:
    """The state of one job.

    The thread that runs it first calls ``build``; only then do the results of the factories exist.
    """

    model: nn.Module
    weights: Weights
    cuts: Cuts
    feed: Feed
    optimizer: ShardedOptimizer

    def __init__(self, job: Job):
        self.job = job
        self.randomness = Randomness(job.seed)
        self.position = Position()
        self.losses: list[float] = []
        """Losses, one per optimizer step."""
        self.validations: list[dict[str, float]] = []
        """Validations, each with its step."""
        self.scale = Scale() if job.precision == "float16" else None
        self.groups: list[Group] = []
        self.group_of: dict[str, Group] = {}
        """Groups by the name of a tensor."""
        self.gradients: dict[Group, Packed] = {}
        self.states: dict[Group, Packed] = {}
        """Optimizer state that is worth moving."""
        self.numbers: dict[str, State] = {}
        """Optimizer state that is not worth moving: numbers, and tensors of one element."""
        self.stepped: set[str] = set()
        """Parameters that were stepped here, so that their states are known."""
        self.update: Update = job.update
        """Which processor steps the optimizer, as decided so far."""
        self.casts: dict[str, bool] = {}
        """Per tensor, whether every forward so far has used it only by casting it to half precision."""
        self.norms: dict[str, torch.Tensor] = {}
        """Norms of the current step's gradients, on the devices that measured them."""
        self.is_finite = True
        """Whether all gradients of the current step are finite."""
        self._losses_of_step: list[float] = []

    def build(self) -> None:
        """Call the factories, in the order of a training script. Raise what they raise."""
        job = self.job
        with self.randomness.swapped_in():
            box = [job.model()]
            if not isinstance(box[0], nn.Module):
                raise TypeError(f"job {job.name!r}: model() must return an nn.Module, got {type(box[0]).__name__}")
            self.model = own_model(box, job.name)
            handed = (storage_id(tensor) for module in box for tensor in module.state_dict().values())
            self.weights = Weights(self.model, job.name, frozenset(handed))
            self.cuts = Cuts(job, self.model, self.weights, self.randomness)
            parameters = self.weights.parameters
            self.optimizer = ShardedOptimizer(
                job.make_optimizer(list(parameters.items())), {id(one): name for name, one in parameters.items()}
            )
            self.scheduler = None if job.lr_scheduler is None else job.lr_scheduler(self.optimizer.master)
            self.feed = Feed(job, job.data(), self.randomness, self.position)
            self.validation = None if job.validation is None else job.validation()

    def is_done(self) -> bool:
        """Whether the job has done its last step."""
        return self.position.is_end_of(self.job)

    def finish_batch(self, loss: float, leaves: Sequence[torch.Tensor], *, stepped: bool) -> None:
        """Note that a mini-batch is done, and the step if it ended one."""
        at = self.position
        at.num_samples += leaves[0].shape[0] if leaves and leaves[0].dim() else 1
        self._losses_of_step.append(loss / self.job.accumulate)
        at.micro += 1
        if not stepped:
            return
        self.losses.append(sum(self._losses_of_step))
        self._losses_of_step, self.norms = [], {}
        if self.scale is not None:
            self.scale.update(self.is_finite)
        self.is_finite = True
        if self.scheduler is not None:
            self.scheduler.step()
        at.step, at.micro = at.step + 1, 0

    def drop_unfinished_step(self) -> list[Item]:
        """Forget batches since the last step. Return the items of their gradients, so that the caller can free them."""
        items = [packed.item for packed in self.gradients.values()]
        self.gradients, self.norms, self._losses_of_step, self.is_finite = {}, {}, [], True
        self.position.micro = 0
        return items

    def over(self) -> "JobTraining":
        """Return what is kept of a job that is over: nothing of its model, data or graphs."""
        other = JobTraining(self.job)
        other.position, other.losses, other.validations = self.position, self.losses, self.validations
        return other

    # Groups

    def use(self, captured: Cuttable, structure: Structure, ends: tuple[int, ...]) -> ShardProgram:
        """Cut the model and group its tensors. The cut holds until the model is cut again."""
        program = self.cuts.cut(captured, structure, ends)
        uses: dict[str, list[int]] = {}
        for at, shard in enumerate(program.shards):
            for name in shard.tensors:
                uses.setdefault(name, []).append(at)
        weights = self.weights
        buffers = [name for name in weights.tensors if name not in weights.parameters]
        self.groups = group(weights.originals, self.optimizer.trained, buffers, uses)
        self.group_of = {name: one for one in self.groups for name in one.layouts}
        return program

    def program(self, leaves: list[torch.Tensor], structure: Structure, *, training: bool = True) -> ShardProgram:
        """Return shards for batches like this one, cut at the same places as the first."""
        known = self.cuts.known(structure, training=training)
        if known is not None:
            return known
        captured = self.cuts.capture(leaves, structure, training=training)
        self.weights.learn(captured.constants)
        program = self.cuts.cut_alike(captured, structure, training=training)
        for at, shard in enumerate(program.shards):
            for name in shard.tensors:
                found = self.group_of.get(name)
                if found is not None and found.kind == "trained":
                    found.shards = tuple(sorted({*found.shards, at}))
                    self.cuts.own(name, found.owner)
        return program

    def add_group(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors that came later: constants of another graph."""
        layouts, size_bytes = packed_layouts(tensors)
        made = Group(kind="buffer", shards=(), layouts=layouts, size_bytes=size_bytes)
        self.groups.append(made)
        self.group_of |= dict.fromkeys(layouts, made)

    def initial_item(self, one: Group, device: torch.device) -> Item:
        """Return a new item for a group, with the values that the factories made."""
        originals = {name: self.weights.originals[name] for name in one.layouts}
        storage = pack(originals, one.layouts, one.size_bytes, device)
        return Item(f"{self.job.name}: {one.kind} of shard {one.owner}", [storage])

    def items(self) -> list[Item]:
        """Return the items that move to another device with the job. Frozen groups belong to no single job."""
        own = [one.item for one in self.groups if one.item is not None and one.kind != "frozen"]
        own += [one.twin.item for one in self.groups if one.twin is not None]
        return own + [packed.item for packed in (*self.gradients.values(), *self.states.values())]
