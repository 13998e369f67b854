"""A job at work: its model in groups, its batches, and the units that train it on whatever device it is on.

Nothing here decides when or where; the worker of a device does (`_worker.py`). Between mini-batches all of the job is
in its groups, gradients and optimizer states, which move from device to device as items.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._groups import Group, group, pack, packed_layouts, span_bytes
from penstock.fleet._handed import own_model
from penstock.fleet._job import AUTOCAST_DTYPES, Job
from penstock.fleet._memory import SMALL_BYTES, Item, counted_bytes
from penstock.fleet._optimizer import ShardedOptimizer
from penstock.fleet._problem import Task
from penstock.fleet._program import Captured, Program, first_line
from penstock.fleet._random import Randomness
from penstock.fleet._stages import Staged
from penstock.fleet._tree import Tree, unchanged
from penstock.stepping import State
from penstock.tiers import ViewLayout, gate

Cuttable = Captured | Staged | Tree
"""A step that can be cut into shards."""


@dataclass(slots=True, eq=False)
class Packed:
    """Tensors of one group's gradients or states in one item: large ones as they were made, small ones in a bundle."""

    item: Item
    places: dict[str, tuple[int, ViewLayout]]
    """Per tensor, which storage of the item, and where in it."""

    @staticmethod
    def of(label: str, tensors: Mapping[str, torch.Tensor]) -> "Packed":
        """Takes the tensors over; nobody else may hold them."""
        storages: list[torch.UntypedStorage] = []
        places: dict[str, tuple[int, ViewLayout]] = {}
        small: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if _is_small(tensor):
                small[name] = tensor
            else:
                places[name] = (len(storages), ViewLayout.of(tensor))
                storages.append(tensor.untyped_storage())
        if small:
            layouts, size_bytes = packed_layouts(small)
            places |= {name: (len(storages), layout) for name, layout in layouts.items()}
            storages.append(pack(small, layouts, size_bytes, next(iter(small.values())).device))
        return Packed(Item(label, storages), places)

    @staticmethod
    def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
        """What the item would take that `of` makes of them."""
        small = {name: tensor for name, tensor in tensors.items() if _is_small(tensor)}
        sizes = [tensor.untyped_storage().nbytes() for name, tensor in tensors.items() if name not in small]
        return counted_bytes([*sizes, packed_layouts(small)[1]] if small else sizes)

    def views(self, storages: list[torch.UntypedStorage]) -> dict[str, torch.Tensor]:
        """The tensors over the item's storages."""
        return {name: layout.rebuild(storages[index]) for name, (index, layout) in self.places.items()}


def _is_small(tensor: torch.Tensor) -> bool:
    size_bytes = tensor.untyped_storage().nbytes()
    return size_bytes < SMALL_BYTES or size_bytes > span_bytes(tensor)


@dataclass(slots=True)
class Scale:
    """Loss scaling for float16, as ``torch.amp.GradScaler`` does it."""

    value: float = 65536.0
    num_good: int = 0

    def update(self, is_finite: bool) -> None:
        """After a step, or one that had to be skipped."""
        if not is_finite:
            self.value, self.num_good = self.value * 0.5, 0
        else:
            self.num_good += 1
            if self.num_good == 2000:
                self.value, self.num_good = self.value * 2.0, 0


@dataclass(slots=True)
class Position:
    """How far a job is."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Of the batch that comes next."""
    batch: int = 0
    """Batches of that epoch taken."""
    micro: int = 0
    """Batches accumulated since the last step."""
    num_samples: int = 0
    """Samples trained on, as the first dimension of batches says."""


class Training:
    """The state of one job. Made by `build`, on the thread that will run it first."""

    def __init__(self, job: Job):
        self.job = job
        self.randomness = Randomness(job.seed)
        self.position = Position()
        self.losses: list[float] = []
        """One per optimizer step."""
        self.validations: list[dict[str, float]] = []
        """One per validation, with its step."""
        self.scale = Scale() if job.precision == "float16" else None
        self.groups: list[Group] = []
        self.gradients: dict[Group, Packed] = {}
        self.states: dict[Group, Packed] = {}
        """Optimizer state that is worth moving."""
        self.numbers: dict[str, State] = {}
        """Optimizer state that is not: numbers, and tensors of one element."""
        self.norms: dict[str, torch.Tensor] = {}
        """Norms of gradients of the step at hand, on the devices that measured them."""
        self.is_finite = True
        """Whether all gradients of the step at hand are finite."""
        self.ends: tuple[int, ...] = ()
        """Where the model is cut: atoms that end a shard."""
        self._losses_of_step: list[float] = []
        self._programs: dict[tuple[Any, ...], Program] = {}
        self.tree: Tree | None = None
        """How the model is cut if it could not be traced; then it is run whole."""
        self.ways: dict[tuple[Any, ...], list[Task]] = {}
        """Units of the last mini-batch of each kind, where the model is run whole."""
        self._hollow: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._batches: Iterator[Any] | None = None
        self._peeked: tuple[list[torch.Tensor], Structure] | None = None
        self.epoch_random: dict[str, Any] | None = None
        """The job's random state when the pass at hand began."""

    def build(self) -> None:
        """Calls the factories, in the order of a training script. Raises what they raise."""
        job = self.job
        with self.randomness.swapped_in():
            box = [job.model()]
            if not isinstance(box[0], nn.Module):
                raise TypeError(f"job {job.name!r}: model() must return an nn.Module, got {type(box[0]).__name__}")
            self.model = own_model(box, job.name)
            self._handed = {
                tensor.untyped_storage()._cdata for module in box for tensor in module.state_dict().values()
            }
            self._modes = [(module, module.training) for module in self.model.modules()]
            self.parameters = dict(self.model.named_parameters())
            self.tensors: dict[str, torch.Tensor] = {**self.parameters, **dict(self.model.named_buffers())}
            self._refuse_what_is_not_there()
            self.optimizer = ShardedOptimizer(
                job.make_optimizer(list(self.parameters.items())),
                {id(one): name for name, one in self.parameters.items()},
            )
            self.scheduler = None if job.lr_scheduler is None else job.lr_scheduler(self.optimizer.master)
            self.data = job.data()
            self.validation = None if job.validation is None else job.validation()
        self.originals = {name: tensor.data for name, tensor in self.tensors.items()}
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model is in evaluation, for stages cut by hand, which run its modules; graphs were traced in it."""
        self.model.eval()
        try:
            yield
        finally:
            self._set_modes()

    def _set_modes(self) -> None:
        """Training or evaluation per module, as the factory left it."""
        for module, mode in self._modes:
            module.training = mode

    def _refuse_what_is_not_there(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"job {self.job.name!r}: {name} has no values yet; model() returns a model ready to train"
                )
            if tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
                raise ValueError(f"job {self.job.name!r}: {name} is not a plain tensor, and fleets train those alone")
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError(
                f"job {self.job.name!r}: no parameter of its model requires a gradient; give `model` one that trains"
            )

    # Data

    def is_done(self) -> bool:
        """Whether the last step is behind it."""
        job, at = self.job, self.position
        return at.step >= job.steps if job.steps is not None else at.epoch >= (job.epochs or 0)

    def peek(self) -> tuple[list[torch.Tensor], Structure]:
        """The batch that `next_batch` will return."""
        while self._peeked is None:
            self._peeked = self.next_batch()
        return self._peeked

    def next_batch(self) -> tuple[list[torch.Tensor], Structure] | None:
        """The next training batch; ``None`` at the end of a pass over the data, after which the next one begins.

        Raises what the data raises, and ``ValueError`` for data without batches.
        """
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        at = self.position
        if self._batches is None:
            self.epoch_random = self.randomness.state()
        with self.randomness.swapped_in():
            if self._batches is None:
                self._batches = iter(self.data)
            batch = next(self._batches, _END)
        if batch is not _END:
            at.batch += 1
            return flatten(batch)
        if not at.batch:
            raise ValueError(
                f"job {self.job.name!r}: its data yields no batch in epoch {at.epoch}; data() "
                "returns what can be iterated again, a list or a DataLoader, not a generator"
            )
        self._batches = None
        at.epoch, at.batch = at.epoch + 1, 0
        return None

    def finish_batch(self, loss: float, leaves: Sequence[torch.Tensor], *, stepped: bool) -> None:
        """Notes a mini-batch as done, and the step that it ended."""
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
        """Forgets batches since the last step; returns the items of their gradients, for whoever holds them."""
        items = [packed.item for packed in self.gradients.values()]
        self.gradients, self.norms, self._losses_of_step, self.is_finite = {}, {}, [], True
        self.position.micro = 0
        return items

    def count_steps(self) -> int:
        """Optimizer steps of the whole job; an estimate where the data does not tell its length."""
        if self.job.steps is not None:
            return self.job.steps
        try:
            num_batches = len(self.data)  # type: ignore[arg-type]  # where it has one
        except TypeError:
            return max(self.position.step + 1, 100)
        return max(1, (self.job.epochs or 1) * num_batches // self.job.accumulate)

    def skip_to(self, position: Position, epoch_random: dict[str, Any] | None) -> None:
        """Goes on where a checkpoint was: takes the batches of its epoch that were taken before it."""
        self.position = replace(position)
        self._batches, self.epoch_random = None, epoch_random
        if not position.batch:
            return
        assert epoch_random is not None
        now = self.randomness.state()
        self.randomness.load(epoch_random)
        with self.randomness.swapped_in():
            self._batches = iter(self.data)
            for _ in range(position.batch):
                next(self._batches)
        self.randomness.load(now)

    # Programs and groups

    def capture(self, leaves: list[torch.Tensor], structure: Structure, *, training: bool) -> Cuttable:
        """The graph of a step on batches like this one."""
        job = self.job
        function = self._loss if training else job.metric or self._loss
        if not training:
            self.model.eval()
        try:
            names = self.names
            with self.randomness.undisturbed(), gate.tracing():
                if job.stages is not None:
                    return Staged(job.stages(self.model), function, leaves, structure, names)
                if self.tree is not None:
                    return self.tree.running(function)
                dtype = AUTOCAST_DTYPES.get(job.precision)  # what reads a dtype finds that of a step
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    return self._trace(function, leaves, structure, trains=training)
        finally:
            self._set_modes()

    def _trace(
        self, function: Callable[[Any, Any], Any], leaves: list[torch.Tensor], structure: Structure, *, trains: bool
    ) -> Captured | Tree:
        """A graph, or, where the model's code depends on numbers, the model run whole."""
        try:
            with unchanged(self.model, numbers=False):  # a trace computes none
                return Captured(self.model, function, leaves, structure, self.names, len(self._programs), trains=trains)
        except CaptureError as refused:
            if self._programs:
                raise
            try:
                self.tree = Tree(self.model, function, leaves, structure, self.names)
            except Exception as error:  # whatever a user's forward raises
                raise CaptureError(
                    f"job {self.job.name!r}: its loss raises {first_line(error)} on the first batch, as it would "
                    f"without a fleet (and {refused})"
                ) from error
            return self.tree

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:  # any: a module or its stand-in, and what data yields
        loss = self.job.loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"job {self.job.name!r}: loss(model, batch) must return a tensor, got {type(loss).__name__}; for "
                "instance loss=lambda model, batch: model(**batch).loss"
            )
        return loss

    def program(self, leaves: list[torch.Tensor], structure: Structure, *, training: bool = True) -> Program:
        """Shards for batches like this one, cut where the first were."""
        key = (structure.signature, training)
        if key not in self._programs:
            captured = self.capture(leaves, structure, training=training)
            self.learn_constants(captured)
            self._programs[key] = program = captured.cut(self._ends_for(captured))
            self._adopt(program)
        return self._programs[key]

    def _adopt(self, program: Program) -> None:
        """Notes which shards use what here; what no graph before used belongs to the first that does."""
        for at, shard in enumerate(program.shards):
            for name in shard.tensors:
                found = self.group_of.get(name)
                if found is not None and found.kind == "trained":
                    found.shards = tuple(sorted({*found.shards, at}))
                    self._owners.setdefault(name, found.owner)

    def knows(self, structure: Structure, *, training: bool = True) -> bool:
        """Whether such a batch came before."""
        return (structure.signature, training) in self._programs

    def learn_constants(self, captured: Cuttable) -> None:
        """Constants of a graph are buffers that the model does not know of."""
        for name, tensor in captured.constants.items():
            if tensor.untyped_storage()._cdata in self._handed:
                raise CaptureError(
                    f"job {self.job.name!r}: forward reads a tensor of the module that model() returned, not of the "
                    "copy that the fleet trains (a hook or a closure refers to it); let model() make a new module"
                )
            if name not in self.tensors:
                self.tensors[name] = tensor.detach()
                self.originals[name] = tensor.detach().data

    def use(self, captured: Cuttable, structure: Structure, ends: tuple[int, ...]) -> Program:
        """Cuts the model for good, or until it is cut again."""
        self.ends = ends
        self._owners = self._owners_of(captured, ends)
        program = self._programs[(structure.signature, True)] = captured.cut(ends)
        uses: dict[str, list[int]] = {}
        for at, shard in enumerate(program.shards):
            for name in shard.tensors:
                uses.setdefault(name, []).append(at)
        buffers = [name for name in self.tensors if name not in self.parameters]
        self.groups = group(self.originals, self.optimizer.trained, buffers, uses)
        self.group_of = {name: one for one in self.groups for name in one.layouts}
        return program

    def _owners_of(self, captured: Cuttable, ends: Sequence[int]) -> dict[str, int]:
        """Per tensor, the first shard that uses it."""
        owners: dict[str, int] = {}
        for shard, (first, last) in enumerate(zip([0, *(end + 1 for end in ends)], ends, strict=False)):
            for atom in captured.atoms[first : last + 1]:
                for name in atom.tensors:
                    owners.setdefault(name, shard)
        return owners

    def _ends_for(self, captured: Cuttable) -> tuple[int, ...]:
        """The same cut in another graph of the model: shard by shard, behind the atoms that use the same tensors."""
        ends = list(self.ends[:-1])
        ends.append(len(captured.atoms) - 1)
        own = self._owners_of(captured, ends)
        if _ascends(ends) and own == {name: owner for name, owner in self._owners.items() if name in own}:
            return tuple(ends)
        found: list[int] = []
        owners: dict[str, int] = {}
        shard, busy_until = 0, 0
        for at, atom in enumerate(captured.atoms):
            first_uses = [name for name in atom.tensors if name in self._owners and name not in owners]
            wanted = max((self._owners[name] for name in first_uses), default=shard)
            if wanted > shard:  # shards that this graph leaves nothing to do end early
                found += [busy_until + one for one in range(wanted - shard - 1)] + [at - 1]
                shard = wanted
            if any(self._owners.get(name) == shard for name in atom.tensors):
                busy_until = at
            owners |= dict.fromkeys(atom.tensors, shard)
        found += [busy_until + one for one in range(len(self.ends) - 1 - shard)] + [len(captured.atoms) - 1]
        own = self._owners_of(captured, found) if _ascends(found) else {}
        if not own or any(self._owners.get(name, owner) != owner for name, owner in own.items()):
            raise CaptureError(
                f"job {self.job.name!r}: a batch of another shape cannot be cut where the first was; "
                "let all batches have one shape (drop_last=True, padding)"
            )
        return tuple(found)

    def put(self, name: str, numbers: torch.Tensor) -> None:
        """Gives a tensor of a model that was just built other numbers, in memory of its own: the user may have its."""
        old = self.originals[name]
        own = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(numbers)
        self.tensors[name].data = self.originals[name] = own

    def hollow(self) -> None:
        """The model keeps shapes and lets its bytes go; they are in the groups."""
        for name, tensor in self.originals.items():
            self.tensors[name].data = self._hollow_of(name, tensor.device)
        self.originals = {}

    def add_group(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors that came later: constants of another graph."""
        layouts, size_bytes = packed_layouts(tensors)
        made = Group(kind="buffer", shards=(), layouts=layouts, size_bytes=size_bytes)
        self.groups.append(made)
        self.group_of |= dict.fromkeys(layouts, made)

    def let_go(self) -> None:
        """The job is over: nothing of its model, data or graphs is kept."""
        self.groups, self.gradients, self.states, self.numbers, self._modes = [], {}, {}, {}, []
        self.group_of = {}
        self.originals, self._programs, self._batches, self._peeked = {}, {}, None, None
        self.tree, self.ways, self._hollow = None, {}, {}
        for key in ("model", "parameters", "tensors", "optimizer", "scheduler", "data", "validation"):
            if hasattr(self, key):
                delattr(self, key)

    def hollow_on(self, device: torch.device) -> dict[int, str]:
        """All tensors of the model stand for shapes on ``device``; returns their names by storage."""
        for name, tensor in self.tensors.items():
            tensor.data = self._hollow_of(name, device)
        self._hollow_device = device
        return {tensor.untyped_storage()._cdata: name for name, tensor in self.tensors.items()}

    def bind_hollow(self, names: Iterable[str]) -> None:
        """These stand for shapes again, where `hollow_on` said."""
        for name in names:
            self.tensors[name].data = self._hollow_of(name, self._hollow_device)

    def _hollow_of(self, name: str, device: torch.device) -> torch.Tensor:
        """Made once: making one takes the tensor's bytes for a moment."""
        if (name, device) not in self._hollow:
            self._hollow[name, device] = hollow(self.tensors[name], device)
        return self._hollow[name, device]

    def make_hollow_on(self, device: torch.device) -> None:
        """Makes what tensors of shapes alone `unbind` needs there, before anything is measured."""
        for name in self.tensors:
            self._hollow_of(name, device)

    def bind(self, members: Mapping[str, torch.Tensor]) -> None:
        """Tensors of the model stand for these bytes."""
        for name, tensor in members.items():
            self.tensors[name].data = tensor

    def unbind(self, names: Mapping[str, Any]) -> None:
        """They stand for shapes alone."""
        for name in names:
            tensor = self.tensors[name]
            tensor.grad = None
            tensor.data = self._hollow_of(name, tensor.device)

    def initial_item(self, one: Group, device: torch.device) -> Item:
        """A group's item from the values that the factories made."""
        storage = pack({name: self.originals[name] for name in one.layouts}, one.layouts, one.size_bytes, device)
        return Item(f"{self.job.name}: {one.kind} of shard {one.owner}", [storage])

    def items(self) -> list[Item]:
        """All that a device has to hand over when the job goes elsewhere; frozen groups are nobody's own."""
        own = [one.item for one in self.groups if one.item is not None and one.kind != "frozen"]
        return own + [packed.item for packed in (*self.gradients.values(), *self.states.values())]


_END = object()


def _ascends(ends: Sequence[int]) -> bool:
    return ends[0] >= 0 and all(one < other for one, other in itertools.pairwise(ends))


def hollow(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of the same shape and strides that takes no memory."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty
