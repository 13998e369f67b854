"""Cutting of a job's model into shards, at the same places for every shape of batch."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.fleet._batch import Structure
from penstock.fleet._job import AUTOCAST_DTYPES, CannotBeCut, Job
from penstock.fleet._problem import Task
from penstock.fleet._program import CapturedStep, ShardProgram, first_line
from penstock.fleet._random import Randomness
from penstock.fleet._stages import Staged
from penstock.fleet._tree import Tree, unchanged
from penstock.fleet._weights import Weights
from penstock.tiers import gate

Cuttable = CapturedStep | Staged | Tree
"""A step that can be cut into shards."""


class Cuts:
    """Programs of one job's model, by the structure of the batch."""

    def __init__(self, job: Job, model: nn.Module, weights: Weights, randomness: Randomness):
        self.uncut_because = ""
        """Why the job runs uncut, to stand after "because"; empty if it does not."""
        self.tree: Tree | None = None
        """How the model is cut if it could not be traced; it is then run whole."""
        self.ways: dict[tuple[Any, ...], list[Task]] = {}
        """Units of the last mini-batch of each kind, if the model is run whole."""
        self._job, self._model, self._weights, self._randomness = job, model, weights, randomness
        self._modes = [(module, module.training) for module in model.modules()]
        self._programs: dict[tuple[Any, ...], ShardProgram] = {}
        self._ends: tuple[int, ...] = ()
        """Where the model is cut: the last atom of each shard."""
        self._owners: dict[str, int] = {}
        """Per tensor, the first shard that uses it."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode for the time of the context.

        Stages cut by hand need it, because they run the model's modules. Graphs were traced in that mode.
        """
        self._model.eval()
        try:
            yield
        finally:
            self._set_modes()

    def capture(self, leaves: list[torch.Tensor], structure: Structure, *, training: bool) -> Cuttable:
        """Return the graph of a step on batches like this one. Raise ``CaptureError`` if there is none."""
        job, function = self._job, self.function(training=training)
        if any(leaf.layout is not torch.strided for leaf in leaves):
            raise CannotBeCut("its batches have sparse tensors")
        if not training:
            self._model.eval()
        try:
            # Alone, since torch.export patches modules and sets flags of the process: beside another thread's trace or
            # step, half of the traces failed, and optimizers took another path.
            with self._randomness.undisturbed(), gate.tracing():
                if job.stages is not None:
                    return Staged(job.stages(self._model), function, leaves, structure, self._weights.names)
                if self.tree is not None:
                    return self.tree.running(function)
                dtype = AUTOCAST_DTYPES.get(job.precision)  # code that reads a dtype finds that of a step
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    return self._trace(function, leaves, structure, trains=training)
        finally:
            self._set_modes()

    def function(self, *, training: bool) -> Callable[[Any, Any], Any]:
        """Return the function of model and batch that a step calls, or a validation."""
        return self._loss if training else self._job.metric or self._loss

    def cut(self, captured: Cuttable, structure: Structure, ends: tuple[int, ...]) -> ShardProgram:
        """Cut the model after these atoms. The cut holds until the model is cut again."""
        self._ends, self._owners = ends, _owners(captured, ends)
        program = self._programs[structure.signature, True] = captured.cut(ends)
        return program

    def cut_alike(self, captured: Cuttable, structure: Structure, *, training: bool) -> ShardProgram:
        """Cut another graph of the model at the same places.

        Raises ``CaptureError`` if its shards would use other tensors.
        """
        program = self._programs[structure.signature, training] = captured.cut(self._ends_for(captured))
        return program

    def known(self, structure: Structure, *, training: bool = True) -> ShardProgram | None:
        """Return the shards for batches of this structure; ``None`` if none came before."""
        return self._programs.get((structure.signature, training))

    def own(self, name: str, shard: int) -> None:
        """Assign a tensor that no earlier graph used to ``shard``."""
        self._owners.setdefault(name, shard)

    def _trace(
        self, function: Callable[[Any, Any], Any], leaves: list[torch.Tensor], structure: Structure, *, trains: bool
    ) -> CapturedStep | Tree:
        """Return a graph, or the model run whole if its code depends on the values of tensors."""
        model, names = self._model, self._weights.names
        try:
            with unchanged(model, numbers=False), self._weights.in_main_memory():  # a trace computes no values
                return CapturedStep(model, function, leaves, structure, names, len(self._programs), trains=trains)
        except CaptureError as refused:
            if self._programs:
                raise
            try:
                self.tree = Tree(model, function, leaves, structure, names)
            except CannotBeCut:
                raise
            except CaptureError as error:
                raise CaptureError(f"job {self._job.name!r}: {error} (and {refused})") from error
            except Exception as error:  # a user's forward may raise anything
                self._refuse_if_plain_fails(function, leaves, structure, refused)
                raise CannotBeCut(f"its loss raises {first_line(error)} where a fleet watches it") from error
            return self.tree

    def _refuse_if_plain_fails(
        self,
        function: Callable[[Any, Any], Any],
        leaves: list[torch.Tensor],
        structure: Structure,
        refused: CaptureError,
    ) -> None:
        """Raise ``CaptureError`` if the first batch fails in the model's own code, watched by nobody."""
        try:
            with unchanged(self._model):
                function(self._model, structure.rebuild([leaf.clone() for leaf in leaves]))
        except Exception as error:
            raise CaptureError(
                f"job {self._job.name!r}: its loss raises {first_line(error)} on the first batch, as it does without "
                f"a fleet (and {refused})"
            ) from error

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:  # any: a module or its stand-in, and what data yields
        loss = self._job.loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"job {self._job.name!r}: loss(model, batch) must return a tensor, got {type(loss).__name__}; for "
                "instance loss=lambda model, batch: model(**batch).loss"
            )
        return loss

    def _set_modes(self) -> None:
        """Restore training or evaluation mode of each module, as the factory left it."""
        for module, mode in self._modes:
            module.training = mode

    def _ends_for(self, captured: Cuttable) -> tuple[int, ...]:
        """Return the same cut in another graph of the model.

        Shard by shard, it cuts after the atoms that use the same tensors.
        """
        ends = list(self._ends[:-1])
        ends.append(len(captured.atoms) - 1)
        own = _owners(captured, ends)
        if _ascends(ends) and own == {name: owner for name, owner in self._owners.items() if name in own}:
            return tuple(ends)
        matched: list[int] = []
        owners: dict[str, int] = {}
        shard, busy_until = 0, 0
        for index, atom in enumerate(captured.atoms):
            first_uses = [name for name in atom.tensors if name in self._owners and name not in owners]
            wanted = max((self._owners[name] for name in first_uses), default=shard)
            if wanted > shard:  # shards without work in this graph end early
                matched += [busy_until + extra for extra in range(wanted - shard - 1)] + [index - 1]
                shard = wanted
            if any(self._owners.get(name) == shard for name in atom.tensors):
                busy_until = index
            owners |= dict.fromkeys(atom.tensors, shard)
        matched += [busy_until + extra for extra in range(len(self._ends) - 1 - shard)] + [len(captured.atoms) - 1]
        own = _owners(captured, matched) if _ascends(matched) else {}
        if not own or any(self._owners.get(name, owner) != owner for name, owner in own.items()):
            raise CaptureError(
                f"job {self._job.name!r}: a batch has another shape than the first one, and the model cannot be cut "
                "into the same shards for it; give all batches one shape (drop_last=True, padding)"
            )
        return tuple(matched)


def _owners(captured: Cuttable, ends: Sequence[int]) -> dict[str, int]:
    """Return, per tensor, the first shard that uses it."""
    owners: dict[str, int] = {}
    for shard, (first, last) in enumerate(zip([0, *(end + 1 for end in ends)], ends, strict=False)):
        for atom in captured.atoms[first : last + 1]:
            for name in atom.tensors:
                owners.setdefault(name, shard)
    return owners


def _ascends(ends: Sequence[int]) -> bool:
    return ends[0] >= 0 and all(end < later for end, later in itertools.pairwise(ends))
