"""A step whose model cannot be traced, cut by its module tree.

If forward depends on values of tensors (masks that are tested, experts that are chosen, layers that are skipped), no
single graph represents all batches. So the model's own code runs, from its first line to its last, in every mini-batch
(`_whole.py`). Only its tensors are cut: an atom holds the tensors of one module, in the order in which a first run used
them, and a shard is a sequence of atoms. A run that takes another path visits shards in another order.

The first run computes on the CPU, where the factories made the model. It lets autograd save nothing, and leaves buffers
and random numbers unchanged.
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.fleet._accesses import Recorder, writes_to
from penstock.fleet._autograd import dropping
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._job import CannotBeCut
from penstock.fleet._program import Atom, Shard, ShardProgram, WholeStep, span
from penstock.storages import storage_id

_numbers = itertools.count()


class Tree:
    """The atoms of a model, from a run of ``function(model, batch)``. Raises ``CaptureError`` if that run fails."""

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any, Any], Any],
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        names: Mapping[int, str],
    ):
        self._number = next(_numbers)
        self.whole = WholeStep(function)
        self.constants: dict[str, torch.Tensor] = {}
        self._names = [
            names[id(tensor)] for _, tensor in _named_tensors(model)
        ]  # in the order of the tree, tied ones at their first place
        self._names = list(dict.fromkeys(self._names))
        tensors = {names[id(tensor)]: tensor for _, tensor in _named_tensors(model)}
        self.atoms = self._find_atoms(self._record(model, leaves, structure, tensors))

    def cut(self, ends: Sequence[int]) -> ShardProgram:
        """Return shards that end after the atoms with these indexes."""
        bounds = list(zip([0, *(end + 1 for end in ends)], ends, strict=False))
        return ShardProgram(
            shards=tuple(self._shard(first, last) for first, last in bounds),
            rebuild_result=self.whole.rebuild,
            fingerprints=tuple(f"tree {self._number} {bound}" for bound in bounds),
            whole=self.whole,
        )

    def running(self, function: Callable[[Any, Any], Any]) -> "Tree":
        """Return the same atoms for another function of the model, such as a metric."""
        other: Tree = object.__new__(Tree)
        other.__dict__.update(self.__dict__, whole=WholeStep(function))
        return other

    def _record(
        self,
        model: nn.Module,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        tensors: Mapping[str, torch.Tensor],
    ) -> Recorder:
        by_storage: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            by_storage.setdefault(storage_id(tensor), []).append(name)
        parameters = {id(parameter) for parameter in model.parameters()}
        own = {name: storage_id(tensor) for name, tensor in tensors.items() if id(tensor) in parameters}
        for without_saving in (True, False):  # code that differentiates inside of forward needs saved tensors
            recorder = Recorder(by_storage, own)
            try:
                with unchanged(model), dropping() if without_saving else nullcontext(), recorder:
                    result = self.whole.function(model, structure.rebuild([leaf.clone() for leaf in leaves]))
                    for name, key in own.items():
                        if storage_id(tensors[name]) != key:
                            raise writes_to(name)
                break
            except (CaptureError, CannotBeCut):
                raise
            except Exception:
                if not without_saving:
                    raise
        outputs, self.whole.result = flatten(result)
        seen = {name for used, _ in recorder.uses for name in used}
        unseen = sorted(_names_in_graph(outputs, {id(tensors[name]): name for name in own}) - seen)
        if unseen:
            raise CannotBeCut(f"{unseen[0]} is used by code of which no operator is seen, such as C++")
        if not seen:
            raise CannotBeCut(
                "no operator is seen to use the model: code in C++ does, or the loss does not call it, as "
                "loss=lambda model, batch: model(**batch).loss does"
            )
        return recorder

    def _find_atoms(self, recorder: Recorder) -> list[Atom]:
        """Return one atom per module, in the order of first uses.

        Unused tensors go to the atom of their neighbors in the tree.
        """
        atoms: list[Atom] = []
        at_of: dict[str, int] = {}
        for used, size_bytes in recorder.uses:
            for name in used:
                if name in at_of:
                    continue
                owner = name.rpartition(".")[0]
                if not atoms or atoms[-1].label != owner:
                    atoms.append(Atom(end=len(atoms), label=owner))
                atoms[-1].tensors.append(name)
                at_of[name] = atoms[-1].end
            atoms[-1].activation_bytes += size_bytes
        owners = {name.rpartition(".")[0]: position for name, position in reversed(at_of.items())}
        last = 0
        for name in self._names:
            last = at_of.get(name, owners.get(name.rpartition(".")[0], last))
            if name not in at_of:
                atoms[last].tensors.append(name)
        return [atom if atom.label else replace(atom, label="the model itself") for atom in atoms]

    def _shard(self, first: int, last: int) -> Shard:
        return Shard(
            run=_not_by_itself,
            tensors=tuple(name for atom in self.atoms[first : last + 1] for name in atom.tensors),
            inputs=(),
            outputs=(),
            label=span(self.atoms[first].label, self.atoms[last].label),
            writes_buffers=True,
        )


def _not_by_itself(
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    device: torch.device,  # noqa: ARG001
) -> Sequence[torch.Tensor]:
    raise AssertionError(
        f"a shard of a model that is run whole cannot be called by itself ({len(tensors)}, {len(inputs)})"
    )


def _names_in_graph(outputs: Sequence[torch.Tensor], names: Mapping[int, str]) -> set[str]:
    """Return the named leaves of autograd's graph of these outputs."""
    leaves, waiting, seen = set(), [output.grad_fn for output in outputs], set[Any]()  # any: nodes of autograd's graph
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves.add(names.get(id(getattr(node, "variable", None)), ""))
        waiting += [following for following, _ in node.next_functions]
    return leaves - {""}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor


@contextmanager
def unchanged(model: nn.Module, *, numbers: bool = True) -> Iterator[None]:
    """Undo what a trial run changes in the model: buffers, and attributes of modules.

    Afterwards buffers are the same tensors, with the same values if ``numbers`` is true. Attributes are the same
    objects, and lists, dicts and sets among them hold the same things.
    """
    buffers = [
        (tensor, tensor.detach().clone())
        for module in model.modules()
        for tensor in module._buffers.values()
        if tensor is not None and numbers
    ]
    attributes = [(module, dict(vars(module)), _copies(vars(module).values())) for module in model.modules()]
    try:
        yield
    finally:
        for module, before, copies in attributes:
            vars(module).clear()
            vars(module).update(before)
            for container, content in copies:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        with torch.no_grad():
            for tensor, before_it in buffers:
                tensor.copy_(before_it)


def _copies(values: Iterable[Any]) -> list[tuple[Any, Any]]:  # any: attributes of modules
    return [(value, copy.copy(value)) for value in values if type(value) in (dict, list, set, OrderedDict)]
