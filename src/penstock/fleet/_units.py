"""The units of one mini-batch of one job: what each needs on the device, and what it does there.

Units run in order, on one device: forward of every shard but the last, the last one's forward and backward together,
backward of the others; and, where the optimizer has to wait for the norm of all gradients, a step of every shard.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.fleet._autograd import TIED, Graph, Saved, Value, backward, dropping, forward
from penstock.fleet._batch import Structure
from penstock.fleet._groups import Group
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._program import BATCH, Program
from penstock.fleet._random import Draws
from penstock.fleet._stepper import Stepper
from penstock.fleet._training import Packed, Training
from penstock.fleet._writes import StandIns, run_watched
from penstock.tiers import ViewLayout

ACTIVATIONS, GRADIENTS = "activations", "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How units run that are not the ordinary ones."""

    is_pilot: bool = False
    """Measures: buffers, gradients and random numbers are as before afterwards."""
    trains: bool = True
    """``False`` for validation."""


class Between(Protocol):
    """Whoever runs a mini-batch, as it is told of its tasks."""

    def begin(self, index: int) -> int:
        """Task ``index`` comes next: what it needs is brought in. Returns the bytes that it takes beside that."""

    def compute(self, index: int) -> None:
        """Lets the mini-batch `run` task ``index``; not called for tasks that are a part of one long call."""

    def end(self, index: int) -> None:
        """Task ``index`` has ended."""


class MiniBatch:
    """One mini-batch on its way through the shards.

    ``saves`` says per shard whether backward finds what forward saved, or runs forward again.
    """

    def __init__(
        self,
        training: Training,
        memory: DeviceMemory,
        program: Program,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        saves: Sequence[bool],
        behaviour: Behaviour | None = None,
        draws: Sequence[Draws] = (),
        micro: int | None = None,
    ):
        """``micro``: how many of its step come before it, where that is not what the job has behind it."""
        self.training, self.memory, self.program = training, memory, program
        self._micro = training.position.micro if micro is None else micro
        self._stepper = Stepper(training, memory)
        self.structure = structure
        self.behaviour = behaviour or Behaviour()
        self.tasks = self._tasks()
        self.results: list[torch.Tensor] = []
        """What the last shard returned, without gradients."""
        self._leaves = {f"{BATCH}{at}": leaf for at, leaf in enumerate(leaves)}
        self._saves = list(saves)
        self._draws = list(draws) or [Draws.ON_HOST] * len(program.shards)
        self._values: dict[str, Value] = {}
        self._graphs: dict[int, Graph] = {}
        self._marks: dict[int, Any] = {}
        self._gradients: dict[str, Value] = {}
        self._made: dict[Item, None] = {}
        self._before: dict[int, Packed] = {}
        """Per shard that will run forward again, the buffers that forward changed, as they were."""
        self._forward_at = {task.shard: at for at, task in enumerate(self.tasks) if task.kind in _FORWARD}
        self._backward_at = {task.shard: at for at, task in enumerate(self.tasks) if task.kind in _BACKWARD}
        self._step_at = {task.shard: at for at, task in enumerate(self.tasks) if task.kind is UnitKind.STEP}
        self._readers: dict[str, list[int]] = {}
        for at, shard in enumerate(program.shards):
            for name in shard.inputs:
                self._readers.setdefault(name, []).append(at)
        self._groups = [self._groups_of(at) for at in range(len(program.shards))]
        self._buffers = frozenset(name for name in training.tensors if training.group_of[name].kind == "buffer")
        self._add_groups_of_other_batches()

    @property
    def steps(self) -> bool:
        """Whether the optimizer steps at its end."""
        behaviour = self.behaviour
        return behaviour.trains and not behaviour.is_pilot and self._micro == self.training.job.accumulate - 1

    @property
    def waits_for_all(self) -> bool:
        """Whether the optimizer needs all gradients before it changes anything."""
        return self.training.job.clip_norm is not None or self.training.scale is not None

    def needs(self, index: int) -> list[Item]:
        """Items that task ``index`` works on, as far as they exist."""
        task = self.tasks[index]
        shard = self.program.shards[task.shard]
        if task.kind is UnitKind.STEP:
            return self._owned_items(task.shard, with_group=True)
        found = [one.item for one in self._groups[task.shard] if one.item is not None]
        graph = self._graphs.get(task.shard)
        if task.kind is UnitKind.BACKWARD and graph is not None and graph.saved is not None:
            found += [graph.saved.item] if graph.saved.item is not None else []
            found += list(graph.saved.homes)
        else:
            found += [self._values[name].item for name in shard.inputs if name in self._values]
        if task.kind is UnitKind.BACKWARD and task.shard in self._before:
            found.append(self._before[task.shard].item)
        if task.kind in _BACKWARD and self.behaviour.trains:
            names = {*shard.inputs, *shard.outputs, *(TIED + name for name in shard.tensors)}
            found += [value.item for name, value in self._gradients.items() if name in names]
            if not self.behaviour.is_pilot:
                found += self._owned_items(task.shard, with_group=False)
        return list(dict.fromkeys(found))

    def plan_uses(self, index: int, base: float = 0.0, *, goes_on: bool = True) -> None:
        """Tells items when they are used next, as seen before task ``index``, in units from now."""
        for one in self.training.groups:
            if one.item is not None:
                one.item.next_use = math.inf
        for at in range(len(self._groups)):
            uses = [self._forward_at.get(at), self._backward_at.get(at), self._step_at.get(at)]
            later = [use - index for use in uses if use is not None and use >= index]
            later += [len(self.tasks) - index + at] if goes_on else []
            nearest = base + min(later, default=math.inf)
            for one in self._groups[at]:
                if one.item is not None:
                    one.item.next_use = min(one.item.next_use, nearest)
            ends = [use - index for use in uses[1:] if use is not None and use >= index]
            for one in self._owned(at):
                for packed in (self.training.gradients.get(one), self.training.states.get(one)):
                    if packed is not None:
                        packed.item.next_use = base + min(ends, default=len(self.tasks) - index + len(self._groups))
            graph = self._graphs.get(at)
            if graph is not None and graph.saved is not None and graph.saved.item is not None:
                graph.saved.item.next_use = base + self._backward_at[at] - index
        for at, packed in self._before.items():
            packed.item.next_use = base + self._backward_at[at] - index
        for name, value in self._values.items():
            value.item.next_use = base + min(self._uses_of_value(name, index), default=math.inf)
        for name, value in self._gradients.items():
            producer = self._backward_at.get(self._consumer_of_gradient(name), index)
            value.item.next_use = base + max(0, producer - index)

    def group_items(self, at: int) -> list[Item]:
        """Of the groups that shard ``at`` uses."""
        return [one.item for one in self._groups[at] if one.item is not None]

    def owned_items(self, at: int) -> list[Item]:
        """Gradients and optimizer states that shard ``at`` collects, as far as they exist."""
        places = (self.training.gradients, self.training.states)
        return [place[one].item for one in self._owned(at) for place in places if one in place]

    def value_uses(self) -> Iterator[tuple[Item, list[int]]]:
        """Items of this mini-batch alone, with the tasks of it that work on them."""
        for at, graph in self._graphs.items():
            if graph.saved is not None and graph.saved.item is not None:
                yield graph.saved.item, [self._backward_at[at]]
        for at, packed in self._before.items():
            yield packed.item, [self._backward_at[at]]
        for name, value in self._values.items():
            readers = self._readers.get(name, ())
            yield value.item, [place[at] for at in readers for place in (self._forward_at, self._backward_at)]
        for name, value in self._gradients.items():
            consumer = self._consumer_of_gradient(name)
            yield value.item, [self._backward_at[consumer]] if consumer in self._backward_at else []

    def run_all(self, between: Between) -> None:
        """Runs all tasks in order, and tells ``between`` where one begins and ends."""
        for index in range(len(self.tasks)):
            between.begin(index)
            between.compute(index)
            between.end(index)

    def run(self, index: int) -> None:
        """Runs task ``index``; what it needs is on the device, or is fetched now."""
        task = self.tasks[index]
        used = self._owned(task.shard) if task.kind is UnitKind.STEP else self._groups[task.shard]
        groups = [one for one in used if one.item is not None]
        for one in groups:
            assert one.item is not None
            (storage,) = self.memory.get(one.item)
            self.training.bind(one.views(storage))
        try:
            if task.kind is UnitKind.STEP:
                self._step(task.shard)
            elif not self.behaviour.trains:
                self._evaluate(task.shard)
            elif task.kind is UnitKind.FORWARD:
                self._forward(task.shard)
            else:
                self._backward(task.shard, is_last=task.kind is UnitKind.FUSED)
        finally:
            for one in groups:
                self.training.unbind(one.layouts)
        self._drop_values(index)

    def value_bytes(self, at: int) -> int:
        """Bytes of the values that shard ``at`` has handed on."""
        items = {self._values[name].item for name in self.program.shards[at].outputs if name in self._values}
        return sum(item.size_bytes for item in items)

    def state_bytes(self, at: int) -> int:
        """Bytes of optimizer state that shard ``at`` has already."""
        states = self.training.states
        return sum(states[one].item.size_bytes for one in self._owned(at) if one in states)

    def gradient_bytes(self) -> int:
        """Bytes of gradients that wait for shards before."""
        return sum(item.size_bytes for item in {value.item for value in self._gradients.values()})

    def saved_bytes(self, at: int) -> int:
        """Bytes that forward of shard ``at`` has saved for its backward and nobody else holds."""
        graph = self._graphs.get(at)
        return 0 if graph is None or graph.saved is None or graph.saved.item is None else graph.saved.item.size_bytes

    def abandon(self) -> None:
        """Gives back whatever is under way."""
        for item in self._made:
            self.memory.discard(item)
        for graph in self._graphs.values():
            if graph.saved is not None and graph.saved.item is not None:
                self.memory.discard(graph.saved.item)
        self._values, self._graphs, self._gradients, self._made, self._before = {}, {}, {}, {}, {}

    def _tasks(self) -> list[Task]:
        last = len(self.program.shards) - 1
        if not self.behaviour.trains:
            return [Task(UnitKind.FORWARD, at) for at in range(last + 1)]
        tasks = [Task(UnitKind.FORWARD, at) for at in range(last)]
        tasks += [Task(UnitKind.FUSED, last), *(Task(UnitKind.BACKWARD, at) for at in reversed(range(last)))]
        if self.steps and self.waits_for_all:
            tasks += [Task(UnitKind.STEP, at) for at in range(last + 1)]
        return tasks

    def _groups_of(self, at: int) -> list[Group]:
        names = self.program.shards[at].tensors
        return list(dict.fromkeys(self.training.group_of[name] for name in names))

    def _add_groups_of_other_batches(self) -> None:
        """Groups with gradients from batches of another shape, which this one's graph does not use: they step too."""
        used = {one for groups in self._groups for one in groups}
        for one in self.training.gradients if self.behaviour.trains and not self.behaviour.is_pilot else ():
            if one not in used:
                self._groups[one.owner].append(one)

    def _owned(self, at: int) -> list[Group]:
        return [one for one in self._groups[at] if one.kind == "trained" and one.owner == at]

    def _owned_items(self, at: int, *, with_group: bool) -> list[Item]:
        training, found = self.training, []
        for one in self._owned(at):
            found += [one.item] if with_group and one.item is not None else []
            found += [training.gradients[one].item] if one in training.gradients else []
            if one in training.states and self.steps and (with_group or not self.waits_for_all):
                found.append(training.states[one].item)
        return found

    def _uses_of_value(self, name: str, index: int) -> list[int]:
        uses = []
        for reader in self._readers.get(name, ()):
            if self._forward_at.get(reader, -1) >= index:
                uses.append(self._forward_at[reader] - index)
            elif self._backward_at.get(reader, -1) >= index:
                uses.append(self._backward_at[reader] - index)
        return uses

    def _consumer_of_gradient(self, name: str) -> int:
        if name.startswith(TIED):
            return self.training.group_of[name.removeprefix(TIED)].owner
        return next((at for at, shard in enumerate(self.program.shards) if name in shard.outputs), -1)

    # What units do

    def _context(self, at: int) -> AbstractContextManager[Any]:
        stack = ExitStack()
        dtype = AUTOCAST_DTYPES.get(self.training.job.precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(self.memory.device.type, dtype=dtype))
        stack.enter_context(self.training.randomness.drawing(self.memory.device, self._draws[at]))
        return stack

    def _tensors(self, at: int) -> list[torch.Tensor]:
        return [self.training.tensors[name] for name in self.program.shards[at].tensors]

    def _inputs(self, at: int) -> tuple[list[torch.Tensor], list[bool]]:
        tensors, needing = [], []
        for name in self.program.shards[at].inputs:
            if name in self._leaves:
                tensors.append(self._leaves[name].to(self.memory.device))
                needing.append(False)
            else:
                value = self._values[name]
                (storage,) = self.memory.get(value.item)
                tensors.append(value.layout.rebuild(storage))
                needing.append(value.needs_gradient)
        return tensors, needing

    def _travelling(self, at: int) -> list[str]:
        """Tensors of the shard whose gradient another one collects."""
        group_of = self.training.group_of
        return [
            name
            for name in self.program.shards[at].tensors
            if group_of[name].kind == "trained" and group_of[name].owner != at
        ]

    def _run_forward(self, at: int) -> tuple[Graph, Sequence[torch.Tensor]]:
        inputs, needing = self._inputs(at)
        with self._context(at):
            return forward(
                self.program.shards[at],
                self._tensors(at),
                inputs,
                travelling=self._travelling(at),
                needing=needing,
                device=self.memory.device,
                buffers=self._buffers,
            )

    def _forward(self, at: int) -> None:
        self._marks[at] = self.training.randomness.mark()
        with self._unchanged_buffers(at) if self.behaviour.is_pilot else nullcontext():
            if not self._saves[at]:
                later = self._written_after(at)
                before = self._copies_of_buffers(at, later)
                with dropping():
                    graph, outputs = self._run_forward(at)
                needing = set(graph.left)
                del graph
                self._keep_values(at, outputs, needing)
                self._keep_buffers(at, before, later)
            else:
                self._forward_and_save(at)
            self._note_changed_buffers(at)

    def _forward_and_save(self, at: int) -> None:
        saved = Saved(self._homes(at), self.memory.device)
        with saved.hooks():
            graph, outputs = self._run_forward(at)
        items = self._keep_values(at, outputs, set(graph.left))
        del outputs
        saved.finish(f"{self.training.job.name}: {ACTIVATIONS} of shard {at}", items)
        if saved.item is not None:
            self.memory.add(saved.item)
        graph.saved = saved
        self._graphs[at] = graph

    def _evaluate(self, at: int) -> None:
        inputs, _ = self._inputs(at)
        with torch.no_grad(), self.training.evaluating(), self._context(at):
            outputs = run_watched(self.program.shards[at], self._tensors(at), inputs, self._buffers, self.memory.device)
            if at == len(self.program.shards) - 1:
                self.results = [one.detach() for one in outputs]
            else:
                self._keep_values(at, outputs, set())
        self._note_changed_buffers(at)

    def _backward(self, at: int, *, is_last: bool) -> None:
        graph = self._graphs.pop(at, None)
        gradients = self._fetched_gradients(at)
        self._lay_gradients_out(at)
        if graph is not None and graph.saved is not None:
            graph.saved.fetched = self.memory.get
            backward(graph, gradients, self._shared(at))
        else:
            replay = nullcontext() if is_last else self.training.randomness.replaying(self._marks[at])
            tries = is_last and self.behaviour.is_pilot
            unchanged = self._unchanged_buffers(at) if tries else self._buffers_before(at)
            with replay, unchanged:
                graph, outputs = self._run_forward(at)
            if is_last:
                self.results = [one.detach() for one in outputs]
                gradients["result.0"] = self._seed(outputs[0])
                if not self.behaviour.is_pilot:
                    self._note_changed_buffers(at)
            del outputs
            backward(graph, gradients, self._shared(at))
        if graph.saved is not None and graph.saved.item is not None:
            self.memory.discard(graph.saved.item)
        del graph
        self._keep_gradients(gradients)
        self._collect_gradients(at)

    def _seed(self, loss: torch.Tensor) -> torch.Tensor:
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"the loss is a scalar that requires a gradient, not a tensor of shape {tuple(loss.shape)}; for "
                "instance loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])"
            )
        seed = torch.ones_like(loss)
        if self.training.scale is not None:
            seed = seed * self.training.scale.value
        return seed / self.training.job.accumulate if self.training.job.accumulate > 1 else seed

    def _shared(self, at: int) -> dict[str, torch.Tensor]:
        """Parameters that the shard owns and others use."""
        return {
            name: self.training.tensors[name] for one in self._owned(at) if len(one.shards) > 1 for name in one.layouts
        }

    def _homes(self, at: int) -> dict[int, Item]:
        """Items that outlive the unit, by the identity of their storage."""
        items = [one.item for one in self._groups[at] if one.item is not None and one.kind != "buffer"]
        items += [self._values[name].item for name in self.program.shards[at].inputs if name in self._values]
        return {self.memory.get(item)[0]._cdata: item for item in items}

    def _keep_values(self, at: int, outputs: Sequence[torch.Tensor], needing: set[str]) -> dict[int, Item]:
        items: dict[int, Item] = {}
        homes = {
            storage for one in self._groups[at] if one.item is not None for storage in _keys(self.memory.get(one.item))
        }
        for name, tensor in zip(self.program.shards[at].outputs, outputs, strict=True):
            tensor = tensor.detach()
            key = tensor.untyped_storage()._cdata
            if key in homes:  # a view of a parameter, whose group goes its own way
                tensor = tensor.clone()
                key = tensor.untyped_storage()._cdata
            if key not in items:
                label = f"{self.training.job.name}: value behind shard {at}"
                items[key] = self._make(label, tensor)
            self._values[name] = Value(items[key], ViewLayout.of(tensor), name in needing)
        return items

    def _keep_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        items: dict[int, Item] = {}
        for name, tensor in gradients.items():
            key = tensor.untyped_storage()._cdata
            if key not in items:
                label = f"{self.training.job.name}: gradient of {name}"
                items[key] = self._make(label, tensor)
            self._gradients[name] = Value(items[key], ViewLayout.of(tensor), False)

    def _fetched_gradients(self, at: int) -> dict[str, torch.Tensor]:
        shard = self.program.shards[at]
        found = {}
        for name in (*shard.outputs, *shard.inputs, *(TIED + name for name in shard.tensors)):
            value = self._gradients.pop(name, None)
            if value is not None:
                (storage,) = self.memory.get(value.item)
                found[name] = value.layout.rebuild(storage)
        return found

    def _lay_gradients_out(self, at: int) -> None:
        """Gradients of the batches before, so that autograd adds to them."""
        if self.behaviour.is_pilot:
            return
        for one in self._owned(at):
            packed = self.training.gradients.get(one)
            if packed is not None:
                for name, tensor in packed.views(self.memory.get(packed.item)).items():
                    self.training.tensors[name].grad = tensor

    def _collect_gradients(self, at: int) -> None:
        for one in self._owned(at):
            self._collect_group(one)

    def _collect_group(self, one: Group) -> None:
        training = self.training
        found = {name: training.tensors[name].grad for name in one.layouts}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if self.behaviour.is_pilot and gradients:  # for their bytes
            self._stepper.measure(gradients)
            Packed.of("", gradients)
        if self.behaviour.is_pilot or not gradients:
            return
        if self.steps:
            self._stepper.measure(gradients)
        if self.steps and not self.waits_for_all:
            self._stepper.step(one, gradients)
        elif one in training.gradients and gradients.keys() == training.gradients[one].places.keys():
            self.memory.changed(training.gradients[one].item)
        else:
            if one in training.gradients:  # a parameter got its first gradient
                self.memory.discard(training.gradients.pop(one).item)
            for name in gradients:
                training.tensors[name].grad = None
            packed = Packed.of(f"{training.job.name}: {GRADIENTS} of shard {one.owner}", gradients)
            training.gradients[one] = packed
            self.memory.add(packed.item)

    def _step(self, at: int) -> None:
        """The optimizer's unit, once all gradients are known."""
        training = self.training
        for one in self._owned(at):
            packed = training.gradients.get(one)
            if packed is None:
                continue
            gradients = packed.views(self.memory.get(packed.item))
            if training.is_finite:
                for name, gradient in gradients.items():
                    training.tensors[name].grad = gradient
                if training.job.clip_norm is not None:
                    self._stepper.clip(gradients)
                self._stepper.step(one, gradients)
            else:
                self.memory.discard(training.gradients.pop(one).item)

    def _note_changed_buffers(self, at: int) -> None:
        """Copies below are old if forward may have written to buffers."""
        for one in self._groups[at] if self.program.shards[at].writes_buffers else ():
            if one.kind == "buffer" and one.item is not None:
                self.memory.changed(one.item)

    def _copies_of_buffers(self, at: int, others: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Of those that forward of the shard may write to, and of ``others``."""
        shard = self.program.shards[at]
        names = {*others, *(self._buffers & set(shard.tensors) if shard.writes_buffers else ())}
        return {name: self.training.tensors[name].detach().clone() for name in shard.tensors if name in names}

    def _written_after(self, at: int) -> set[str]:
        """Buffers that the shard reads and a later one may write to."""
        shards = self.program.shards
        later = {name for one in shards[at + 1 :] if one.writes_buffers for name in one.tensors}
        return later & self._buffers & set(shards[at].tensors)

    def _keep_buffers(self, at: int, before: dict[str, torch.Tensor], later: Collection[str]) -> None:
        """Those that forward changes, here or ``later``, as it found them. Batch norm's kernel raises no version."""
        tensors = self.training.tensors
        for name in [name for name in before if name not in later]:
            if torch.equal(before[name], tensors[name].detach()):
                del before[name]
        if before:
            self._before[at] = Packed.of(f"{self.training.job.name}: buffers before shard {at}", before)
            self._made[self.memory.add(self._before[at].item)] = None

    def _unchanged_buffers(self, at: int) -> StandIns:
        """What is written to buffers is forgotten."""
        return StandIns(self.training.tensors, self._copies_of_buffers(at))

    def _buffers_before(self, at: int) -> StandIns:
        """Buffers are as forward found them, and what is written to them is forgotten."""
        before = self._before.pop(at, None)
        views = {} if before is None else before.views(self.memory.get(before.item))
        return StandIns(self.training.tensors, views)

    def _make(self, label: str, tensor: torch.Tensor) -> Item:
        item = self.memory.add(Item(label, [tensor.untyped_storage()]))
        self._made[item] = None
        return item

    def _drop_values(self, index: int) -> None:
        """Lets go of what no later unit reads."""
        self._values = {name: value for name, value in self._values.items() if self._uses_of_value(name, index + 1)}
        used = {value.item for value in (*self._values.values(), *self._gradients.values())}
        for graph in self._graphs.values():
            used |= set(graph.saved.homes) if graph.saved is not None else set()
        used |= {packed.item for packed in self._before.values()}
        for item in [item for item in self._made if item not in used]:
            del self._made[item]
            self.memory.discard(item)


_FORWARD = (UnitKind.FORWARD, UnitKind.FUSED)
_BACKWARD = (UnitKind.FUSED, UnitKind.BACKWARD)


def _keys(storages: list[torch.UntypedStorage]) -> list[int]:
    return [storage._cdata for storage in storages]
