"""A job in training: its model in groups, its batches, and its optimizer, on any device.

Nothing here decides when or where it runs. The worker of a device does (`_worker.py`). Between mini-batches all of the
job is in its groups, gradients and optimizer states, which move from device to device as items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.fleet._batch import Structure
from penstock.fleet._cuts import Cuts, Cuttable
from penstock.fleet._feed import Feed, Position
from penstock.fleet._groups import Group, JobGroups, group_tensors, pack, packed_layouts
from penstock.fleet._handed import own_model
from penstock.fleet._job import Job, Update
from penstock.fleet._memory import Item
from penstock.fleet._open_step import OpenStep
from penstock.fleet._optimizer import OptimizerStates, ShardedOptimizer
from penstock.fleet._program import ShardProgram
from penstock.fleet._random import Randomness
from penstock.fleet._weights import Weights, why_uncut
from penstock.storages import storage_id


@dataclass(slots=True)
class History:
    """The figures of a job that are kept when it is over."""

    losses: list[float] = field(default_factory=list)
    """Losses, one per optimizer step."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Validations, each with its step."""
    weights: dict[str, torch.Tensor] | None = None
    """The weights of a job that is over, if no checkpoint of them could be written."""


class JobTraining:
    """The state of one job.

    The thread that runs it first calls ``build``; only then do the results of the factories exist.
    """

    weights: Weights
    cuts: Cuts
    feed: Feed
    optimizer: ShardedOptimizer

    def __init__(self, job: Job):
        self.job = job
        self.randomness = Randomness(job.seed)
        self.position = Position()
        self.history = History()
        self.groups = JobGroups()
        self.open_step = OpenStep(job)
        self.states = OptimizerStates()
        self.update: Update = job.update
        """Which processor steps the optimizer, as decided so far."""

    def build(self, device: torch.device) -> None:
        """Call the factories, in the order of a training script. Raise what they raise.

        ``device`` is where a job that cannot be cut will train. Its optimizer is made there.
        """
        job = self.job
        with self.randomness.swapped_in():
            box = [job.model()]
            if not isinstance(box[0], nn.Module):
                raise TypeError(f"job {job.name!r}: model() must return an nn.Module, got {type(box[0]).__name__}")
            model = own_model(box, job.name)
            held = (tensor for module in box for tensor in module.state_dict().values())
            handed = (storage_id(tensor) for tensor in held if tensor.layout is torch.strided)
            self.weights = Weights(model, job.name, frozenset(handed))
            self.cuts = Cuts(job, model, self.weights, self.randomness)
        mark = self.randomness.cpu, self.randomness.python, self.randomness.numpy
        with self.randomness.swapped_in():
            self.optimizer = self._make_optimizer()
        self.cuts.uncut_because = why_uncut(model) or self.optimizer.why_whole
        if self.cuts.uncut_because and device.type != "cpu":
            model.to(device)
            self.randomness.cpu, self.randomness.python, self.randomness.numpy = mark
            with self.randomness.swapped_in():
                self.optimizer = self._make_optimizer()
        before = self.randomness.state()
        with self.randomness.swapped_in():
            data = job.data()
            validation = None if job.validation is None else job.validation()
            if validation is None and self.optimizer.waits_for_metric:
                raise ValueError(
                    f"job {job.name!r}: ReduceLROnPlateau takes a metric, so lr_scheduler= needs validation data: "
                    "validation=lambda: batches"
                )
            self.feed = Feed(job, data, validation, self.randomness, self.position, lambda: self._data_again(before))

    def _data_again(self, mark: dict[str, Any]) -> Iterable[Any]:  # any: a state of `Randomness`; batches
        """Return the data as it was made first."""
        now = self.randomness.state()
        self.randomness.load(mark)
        with self.randomness.swapped_in():
            data = self.job.data()
        self.randomness.load(now)
        return data

    def _make_optimizer(self) -> ShardedOptimizer:
        job, parameters = self.job, self.weights.parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        optimizer = job.make_optimizer(list(parameters.items()))
        return ShardedOptimizer(optimizer, names, job.lr_scheduler, separable=job.separable)

    def stay_uncut(self, reason: str, device: torch.device) -> None:
        """Turn into a job that runs uncut on ``device``. Nothing of it was trained, and all its groups are gone."""
        self.groups, self.weights.casts = JobGroups(), {}
        if not self.cuts.uncut_because:
            self.weights.put_back()
            self.weights.model.to(device)
            self.optimizer.put_back_states(self.weights.parameters)
        self.weights.originals = {}  # the model has them, or copies on the device
        self.cuts.uncut_because, self.update = reason, "device"

    def is_done(self) -> bool:
        """Whether the job has done its last step."""
        return self.position.is_end_of(self.job)

    def finish_batch(self, loss: float, leaves: Sequence[torch.Tensor], *, stepped: bool) -> None:
        """Note that a mini-batch is done, and the step if it ended one."""
        position = self.position
        position.num_samples += leaves[0].shape[0] if leaves and leaves[0].dim() else 1
        self.open_step.add_loss(loss)
        position.micro += 1
        if not stepped:
            return
        self.history.losses.append(self.open_step.end())
        if self.optimizer.scheduler is not None and not self.optimizer.waits_for_metric:
            self.optimizer.scheduler.step()
        position.step, position.micro = position.step + 1, 0

    def drop_unfinished_step(self) -> list[Item]:
        """Forget batches since the last step. Return the items of their gradients, so that the caller can free them."""
        self.position.micro = 0
        return self.open_step.drop()

    def over(self) -> "JobTraining":
        """Return what is kept of a job that is over: nothing of its model, data or graphs."""
        other = JobTraining(self.job)
        other.position, other.history = self.position, self.history
        return other

    # Groups

    def use(self, captured: Cuttable, structure: Structure, ends: tuple[int, ...]) -> ShardProgram:
        """Cut the model and group its tensors. The cut holds until the model is cut again."""
        program = self.cuts.cut(captured, structure, ends)
        uses: dict[str, list[int]] = {}
        for index, shard in enumerate(program.shards):
            for name in shard.tensors:
                uses.setdefault(name, []).append(index)
        weights = self.weights
        buffers = [name for name in weights.tensors if name not in weights.parameters]
        self.groups = JobGroups(group_tensors(weights.originals, self.optimizer.trained, buffers, uses))
        return program

    def program(self, leaves: list[torch.Tensor], structure: Structure, *, training: bool = True) -> ShardProgram:
        """Return shards for batches like this one, cut at the same places as the first."""
        known = self.cuts.known(structure, training=training)
        if known is not None:
            return known
        captured = self.cuts.capture(leaves, structure, training=training)
        self.weights.learn(captured.constants)
        program = self.cuts.cut_alike(captured, structure, training=training)
        for index, shard in enumerate(program.shards):
            for name in shard.tensors:
                group = self.groups.by_name.get(name)
                if group is not None and group.kind == "trained":
                    group.shards = tuple(sorted({*group.shards, index}))
                    self.cuts.own(name, group.owner)
        return program

    def add_group(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors that came later: constants of another graph."""
        layouts, size_bytes = packed_layouts(tensors)
        self.groups.add(Group(kind="buffer", shards=(), layouts=layouts, size_bytes=size_bytes))

    def initial_item(self, group: Group, device: torch.device) -> Item:
        """Return a new item for a group, with the values that the factories made."""
        originals = {name: self.weights.originals[name] for name in group.layouts}
        storage = pack(originals, group.layouts, group.size_bytes, device)
        return Item(f"{self.job.name}: {group.kind} of shard {group.owner}", [storage])

    def items(self) -> list[Item]:
        """Return the items that move to another device with the job. Frozen groups belong to no single job."""
        own = [group.item for group in self.groups if group.item is not None and group.kind != "frozen"]
        own += [group.twin.item for group in self.groups if group.twin is not None]
        return own + [packed.item for packed in (*self.open_step.gradients.values(), *self.states.packed.values())]
