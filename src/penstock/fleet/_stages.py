"""A step as stages that the user cut by hand: modules in order, each of which takes the result of the previous one.

The user's function calls the model once. In the first shard this call is interrupted to get its arguments; in the last
shard it returns the result of the stages. Values between stages may be any nest of tensors.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._program import BATCH, Atom, Shard, ShardProgram, span
from penstock.storages import storage_id

Stage = Callable[..., Any]
_numbers = itertools.count()


class Staged:
    """The stages of one model, for batches with one signature. Raises ``CaptureError`` if they do not fit together."""

    def __init__(
        self,
        stages: Sequence[Stage],
        function: Callable[[Any, Any], Any],
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        names: dict[int, str],
    ):
        if not stages:
            raise CaptureError("stages= returned nothing; for instance lambda model: [model.embed, *model.blocks]")
        self._stages = list(stages)
        self._number = next(_numbers)
        self._function, self._structure = function, structure
        self._names = names
        self._num_leaves = len(leaves)
        self.constants: dict[str, torch.Tensor] = {}
        self.result = structure
        self._after: list[Structure] = []
        self._counts: list[int] = []
        self._num_results = 1
        self.atoms = self._find_atoms(leaves)

    def cut(self, ends: Sequence[int]) -> ShardProgram:
        """Return shards that end after the atoms with these indexes."""
        last = [self.atoms[end].end for end in ends]
        bounds = list(zip([0, *(end + 1 for end in last)], last, strict=False))
        shards = tuple(self._shard(first, last) for first, last in bounds)
        prints = tuple(f"{self._number} {bound}" for bound in bounds)  # two modules cannot be compared
        return ShardProgram(shards=shards, rebuild_result=self._rebuild, fingerprints=prints)

    def _rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:  # any: what the function returned when it last ran
        return self.result.rebuild(tensors)

    def _find_atoms(self, leaves: Sequence[torch.Tensor]) -> list[Atom]:
        """Find the shapes between stages in a run on meta tensors.

        A stage that writes to its input is merged with the stage before it.
        """
        inputs: list[torch.Tensor] = [leaf.to("meta") for leaf in leaves]
        tensors = {name: tensor.to("meta") for stage in self._stages for name, tensor in self._tensors_of(stage)}
        atoms: list[Atom] = []
        earlier: list[list[tuple[torch.Tensor, int]]] = []  # what each atom handed on, with versions
        for index, stage in enumerate(self._stages):
            try:
                outputs = self._compute(index, index, tensors, inputs, leaves=[leaf.to("meta") for leaf in leaves])
            except Exception as error:  # the user's stage may raise anything
                raise CaptureError(
                    f"stage {index} ({_name_of(stage)}) cannot follow the stages before it: {error}"
                ) from error
            own = [name for name, _ in self._tensors_of(stage)]
            while any(value._version != version for handed in earlier for value, version in handed):
                own = [*atoms.pop().tensors, *own]
                earlier.pop()
            sizes = {storage_id(value): value.untyped_storage().nbytes() for value in outputs}
            atoms.append(Atom(end=index, tensors=own, crossing_bytes=sum(sizes.values()), label=_name_of(stage)))
            earlier.append([(value, value._version) for value in outputs])
            inputs = list(outputs)
        return atoms

    def _tensors_of(self, stage: Stage) -> list[tuple[str, torch.Tensor]]:
        """Return the stage's parameters and buffers by their names in the model, each once."""
        if not isinstance(stage, nn.Module):
            return []
        try:
            own = [*stage.parameters(), *stage.buffers()]
            return [(self._names[id(tensor)], tensor) for tensor in own]
        except KeyError:
            raise CaptureError(
                f"stage {_name_of(stage)} has parameters that the model does not have; stages must be parts of the "
                "model"
            ) from None

    def _shard(self, first: int, last: int) -> Shard:
        names = tuple(
            dict.fromkeys(name for stage in self._stages[first : last + 1] for name, _ in self._tensors_of(stage))
        )
        is_last = last == len(self._stages) - 1
        batch = tuple(f"{BATCH}{index}" for index in range(self._num_leaves))
        before = tuple(f"stage{first - 1}.{index}" for index in range(self._counts[first - 1])) if first else ()
        num_outputs = self._num_results if is_last else self._counts[last]
        kind = "result." if is_last else f"stage{last}."

        def run(
            tensors: Sequence[torch.Tensor],
            inputs: Sequence[torch.Tensor],
            device: torch.device,  # noqa: ARG001  # where what it is given lies
        ) -> Sequence[torch.Tensor]:
            leaves = inputs[len(before) :] if is_last or not first else ()
            return self._compute(first, last, dict(zip(names, tensors, strict=True)), inputs[: len(before)], leaves)

        return Shard(
            run=run,
            tensors=names,
            inputs=before + (batch if is_last or not first else ()),
            outputs=tuple(f"{kind}{index}" for index in range(num_outputs)),
            label=span(_name_of(self._stages[first]), _name_of(self._stages[last])),
            writes_buffers=True,
        )

    def _compute(
        self,
        first: int,
        last: int,
        tensors: dict[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        if first == 0:
            args, kwargs = self._call_of(leaves)
            value = self._call(0, tensors, *args, **kwargs)
        else:
            value = self._follow(first, tensors, self._after[first - 1].rebuild(inputs))
        for index in range(first + 1, last + 1):
            value = self._follow(index, tensors, value)
        is_last = last == len(self._stages) - 1
        if is_last:
            value = self._function(lambda *_, **__: value, self._structure.rebuild(leaves))
        outputs, structure = flatten(value)
        if is_last:
            self.result, self._num_results = structure, len(outputs)
        elif len(self._after) == last:
            self._after.append(structure)
            self._counts.append(len(outputs))
        return outputs

    def _call_of(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the user's function calls the model."""

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _Called(args, kwargs)

        try:
            self._function(stop, self._structure.rebuild(leaves))
        except _Called as call:
            return call.given, call.named
        raise CaptureError("the loss never calls the model; for instance loss=lambda model, batch: model(**batch).loss")

    def _follow(self, index: int, tensors: dict[str, torch.Tensor], value: Any) -> Any:
        return self._call(index, tensors, *value) if isinstance(value, tuple) else self._call(index, tensors, value)

    def _call(self, index: int, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        stage = self._stages[index]
        if not isinstance(stage, nn.Module):
            return stage(*args, **kwargs)
        own = {key: tensors[self._names[id(tensor)]] for key, tensor in (*_parameters(stage), *_buffers(stage))}
        return torch.func.functional_call(stage, own, args, kwargs, tie_weights=False)


class _Called(BaseException):
    """A call of the model, with its arguments.

    It is not an ``Exception``, so that the user's code does not catch it.
    """

    def __init__(self, given: tuple[Any, ...], named: dict[str, Any]):
        super().__init__()
        self.given, self.named = given, named


def _parameters(stage: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(stage.named_parameters(remove_duplicate=False))


def _buffers(stage: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(stage.named_buffers(remove_duplicate=False))


def _name_of(stage: Stage) -> str:
    return type(stage).__name__ if isinstance(stage, nn.Module) else getattr(stage, "__name__", repr(stage))
