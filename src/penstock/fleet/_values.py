"""Values, graphs and gradients between the units of one mini-batch of a model that was cut.

Each is an item of the device's memory, and is freed as soon as no later unit reads it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from penstock.fleet._autograd import TIED, CrossValue, ShardGraph
from penstock.fleet._memory import Item
from penstock.fleet._order import TaskOrder
from penstock.fleet._packed import Packed
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._program import BATCH
from penstock.fleet._work import Work
from penstock.storages import id_of, storage_id
from penstock.tiers import ViewLayout


class Values:
    """The values between shards of one mini-batch. ``leaves`` are the tensors of the batch."""

    def __init__(self, work: Work, order: TaskOrder, leaves: Sequence[torch.Tensor]):
        self._work, self._order = work, order
        self._leaves = {f"{BATCH}{index}": leaf for index, leaf in enumerate(leaves)}
        self.graphs: dict[int, ShardGraph] = {}
        """Per shard, the graph of a forward whose saved tensors backward uses."""
        self._values: dict[str, CrossValue] = {}
        self._gradients: dict[str, CrossValue] = {}
        self._before: dict[int, Packed] = {}
        """Per shard that will run forward again, the buffers that forward changed, with their earlier values."""
        self._made: dict[Item, None] = {}

    # Who needs what

    def needed_by(self, task: Task) -> list[Item]:
        """Return the items that the task reads, as far as they exist."""
        shard, graph = self._work.program.shards[task.shard], self.graphs.get(task.shard)
        items: list[Item] = []
        if task.kind is UnitKind.BACKWARD and graph is not None and graph.saved is not None:
            items += [graph.saved.item] if graph.saved.item is not None else []
            items += list(graph.saved.homes)
        else:
            items += [self._values[name].item for name in shard.inputs if name in self._values]
        if task.kind is UnitKind.BACKWARD and task.shard in self._before:
            items.append(self._before[task.shard].item)
        if task.kind is not UnitKind.FORWARD:
            names = {*shard.inputs, *shard.outputs, *(TIED + name for name in shard.tensors)}
            items += [value.item for name, value in self._gradients.items() if name in names]
        return items

    def uses(self) -> Iterator[tuple[Item, list[int]]]:
        """Yield all items, each with the positions of the tasks that work on it."""
        order = self._order
        for shard, graph in self.graphs.items():
            if graph.saved is not None and graph.saved.item is not None:
                yield graph.saved.item, [order.backward_at[shard]]
        for shard, packed in self._before.items():
            yield packed.item, [order.backward_at[shard]]
        for name, value in self._values.items():
            yield value.item, order.readers_of(name)
        for name, value in self._gradients.items():
            yield value.item, order.consumers_of(name)

    def drop_after(self, index: int) -> None:
        """Free what no task after ``index`` reads."""
        self._values = {
            name: value
            for name, value in self._values.items()
            if any(place > index for place in self._order.readers_of(name))
        }
        used = {value.item for value in (*self._values.values(), *self._gradients.values())}
        for graph in self.graphs.values():
            used |= set(graph.saved.homes) if graph.saved is not None else set()
        used |= {packed.item for packed in self._before.values()}
        for item in [item for item in self._made if item not in used]:
            del self._made[item]
            self._work.memory.discard(item)

    def abandon(self) -> None:
        """Give back everything that is under way."""
        for item in self._made:
            self._work.memory.discard(item)
        for graph in self.graphs.values():
            if graph.saved is not None and graph.saved.item is not None:
                self._work.memory.discard(graph.saved.item)
        self._values, self.graphs, self._gradients, self._made, self._before = {}, {}, {}, {}, {}

    # Values

    def inputs(self, shard: int) -> tuple[list[torch.Tensor], list[bool]]:
        """Return the inputs of ``shard``, on the device, and for each whether backward goes through it."""
        memory, tensors, needing = self._work.memory, [], []
        for name in self._work.program.shards[shard].inputs:
            if name in self._leaves:
                tensors.append(self._leaves[name].to(memory.device))
                needing.append(False)
            else:
                value = self._values[name]
                (storage,) = memory.get(value.item)
                tensors.append(value.layout.rebuild(storage))
                needing.append(value.needs_gradient)
        return tensors, needing

    def homes(self, shard: int) -> dict[int, Item]:
        """Return the items that outlive the forward of ``shard``, by the identity of their storage."""
        items = [
            self._work.item_of(group)
            for group in self._work.groups[shard]
            if group.item is not None and group.kind != "buffer"
        ]
        items += [self._values[name].item for name in self._work.program.shards[shard].inputs if name in self._values]
        return {id_of(self._work.memory.get(item)[0]): item for item in items}

    def hand_on(self, shard: int, outputs: Sequence[torch.Tensor], needing: set[str]) -> dict[int, Item]:
        """Keep the outputs of ``shard``. Backward goes through ``needing``. Return their items by storage."""
        items: dict[int, Item] = {}
        held = {id_of(storage) for item in self._work.group_items(shard) for storage in self._work.memory.get(item)}
        for name, tensor in zip(self._work.program.shards[shard].outputs, outputs, strict=True):
            tensor = tensor.detach()
            if storage_id(tensor) in held:  # a view of a parameter, whose group moves on its own
                tensor = tensor.clone()
            item = self._item_of(tensor, items, f"value behind shard {shard}")
            self._values[name] = CrossValue(item, ViewLayout.of(tensor), name in needing)
        return items

    def value_bytes(self, shard: int) -> int:
        """Return the bytes of the values that ``shard`` has handed on."""
        outputs = self._work.program.shards[shard].outputs
        return _bytes_of(self._values[name] for name in outputs if name in self._values)

    def saved_bytes(self, shard: int) -> int:
        """Return the bytes that forward of ``shard`` has saved for its backward and that no other item holds."""
        graph = self.graphs.get(shard)
        return 0 if graph is None or graph.saved is None or graph.saved.item is None else graph.saved.item.size_bytes

    # Gradients

    def take_gradients(self, shard: int) -> dict[str, torch.Tensor]:
        """Return the gradients with which backward of shard ``layers`` begins. The caller owns them from now on."""
        layers = self._work.program.shards[shard]
        gradients = {}
        for name in (*layers.outputs, *layers.inputs, *(TIED + name for name in layers.tensors)):
            value = self._gradients.pop(name, None)
            if value is not None:
                (storage,) = self._work.memory.get(value.item)
                gradients[name] = value.layout.rebuild(storage)
        return gradients

    def hand_back(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Keep the gradients for which earlier shards wait."""
        items: dict[int, Item] = {}
        for name, tensor in gradients.items():
            item = self._item_of(tensor, items, f"gradient of {name}")
            self._gradients[name] = CrossValue(item, ViewLayout.of(tensor), False)

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients for which earlier shards wait."""
        return _bytes_of(self._gradients.values())

    # Buffers before forward

    def keep_before(self, shard: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Keep buffers for the forward that backward of ``shard`` will run again."""
        if buffers:
            packed = Packed.of(f"{self._work.training.job.name}: buffers before shard {shard}", buffers)
            self._before[shard] = packed
            self._made[self._work.memory.add(packed.item)] = None

    def take_before(self, shard: int) -> dict[str, torch.Tensor]:
        """Take the buffers that `keep_before` kept."""
        packed = self._before.pop(shard, None)
        return {} if packed is None else packed.views(self._work.memory.get(packed.item))

    def _item_of(self, tensor: torch.Tensor, known: dict[int, Item], label: str) -> Item:
        """Return the item of a tensor's storage. It is made unless it is ``known``."""
        key = storage_id(tensor)
        if key not in known:
            item = Item(f"{self._work.training.job.name}: {label}", [tensor.untyped_storage()])
            known[key] = self._work.memory.add(item)
            self._made[item] = None
        return known[key]


def _bytes_of(values: Iterable[CrossValue]) -> int:
    return sum(item.size_bytes for item in {value.item for value in values})
