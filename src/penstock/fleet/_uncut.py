"""Jobs that are not cut: the loop of a training script, on a device of their own until they are over.

Some jobs cannot be cut, or are not known to be right if they are: optimizers of somebody else's may look at all
parameters at once, hooks may read any parameter, gradients may be sparse, and code in C++ uses weights without being
seen. Such a job trains as its script would. Its tensors stay the ones that its factories made, whoever refers to them,
and the optimizer runs its own ``step``, once, whole. So nothing of the job ever leaves the device, and no other job
takes the device before this one is over.

No step is tried, since what a foreign optimizer does in it is unknown. The first two steps, which make the state and
use it, are measured as they run. If they took more than the budget, the job ends with an error that names one that
works. Later mini-batches that take more are told.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from penstock.errors import BudgetError, BudgetNotKeptWarning
from penstock.fleet._batch import Structure, flatten
from penstock.fleet._devices import free_bytes
from penstock.fleet._gradients import Gradients
from penstock.fleet._job import AUTOCAST_DTYPES
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._meter import recorded
from penstock.fleet._optimizer import WHAT_WORKS, closure_refused
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._program import Shard, ShardProgram, WholeStep
from penstock.fleet._stepper import Stepper
from penstock.fleet._training import JobTraining
from penstock.fleet._units import MiniBatch
from penstock.fleet._work import Behaviour, Work
from penstock.probe import can_record
from penstock.stepping import missing_state_bytes, tensors_in
from penstock.storages import storage_id
from penstock.units import format_bytes

_DECIDING_STEPS = 2
"""Steps after which the bytes of a job are known: the first makes the optimizer's state, the second has it."""
_SPARE = 50
"""Divisor of a measured peak: the named budget is larger by the peak divided by it, since allocations are aligned."""


class UncutBatch(MiniBatch):
    """One mini-batch of such a job, in one unit: forward, backward and, where it ends a step, the optimizer's step."""

    def __init__(self, work: Work, leaves: Sequence[torch.Tensor], *, is_measured: bool):
        self.work, self.tasks = work, [Task(UnitKind.FUSED if work.behaviour.trains else UnitKind.FORWARD, 0)]
        self.peak_bytes = 0
        """The most that the job took on the device, once the unit has run; 0 if it was not measured."""
        self._leaves, self._is_measured = leaves, is_measured
        self._results: list[torch.Tensor] = []

    @property
    def results(self) -> list[list[torch.Tensor]]:
        """The function's results, without gradients."""
        return [self._results]

    def needs(self, index: int) -> list[Item]:  # noqa: ARG002
        """Return nothing: the job's tensors are in no items."""
        return []

    def plan_uses(self, index: int) -> None:
        """Plan nothing."""

    def abandon(self) -> None:
        """Have nothing to give back."""

    def run(self, index: int) -> None:  # noqa: ARG002
        """Run the mini-batch as a training script would."""
        training, device = self.work.training, self.work.memory.device
        held_bytes = job_bytes(training, device)
        measuring = recorded(device) if self._is_measured else nullcontext()
        with measuring as recording, training.randomness.drawing_anyhow(device):
            if self.work.behaviour.trains:
                self._train()
            else:
                with torch.no_grad(), training.cuts.evaluating():
                    self._results = [output.detach() for output in self._call()]
        if recording is not None:
            self.peak_bytes = held_bytes + recording.report.activation_bytes

    def _train(self) -> None:
        outputs = self._call()
        self._results = [output.detach() for output in outputs]
        loss = outputs[0]
        del outputs
        torch.autograd.backward(loss, Gradients(self.work).seed(loss))
        del loss
        if self.work.steps:
            self._step()

    def _step(self) -> None:
        training = self.work.training
        tensors, master = training.weights.tensors, training.optimizer.master
        gradients = {
            name: gradient
            for name in training.weights.parameters
            if name in training.optimizer.trained and (gradient := tensors[name].grad) is not None
        }
        stepper = Stepper(training, self.work.memory)
        stepper.measure(gradients)
        if training.open_step.is_finite:
            if training.job.clip_norm is not None:
                stepper.clip(gradients)
            del gradients
            try:
                master.step()
            except (TypeError, AssertionError) as error:  # "Sharpness Aware Minimization requires closure, ..."
                if "closure" in str(error).lower():
                    raise closure_refused(master) from error
                raise
        master.zero_grad()

    def _call(self) -> Sequence[torch.Tensor]:
        training, device, whole = self.work.training, self.work.memory.device, self.work.program.whole
        assert whole is not None
        dtype = AUTOCAST_DTYPES.get(training.job.precision)
        batch = self.work.structure.rebuild([leaf.to(device) for leaf in self._leaves])
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            outputs, whole.result = flatten(whole.function(training.weights.model, batch))
        return outputs


class Uncut:
    """The bytes of a job on the device that it has to itself; the `Expected` of its units."""

    def __init__(self, training: JobTraining, memory: DeviceMemory):
        self._training, self._memory = training, memory
        self._num_steps = self._most_bytes = self._told_bytes = 0
        least = job_bytes(training, memory.device) + sum(
            parameter.nbytes for name, parameter in training.weights.parameters.items() if parameter.requires_grad
        )
        least += missing_state_bytes(training.optimizer.master)
        if least > max(memory.room_bytes, free_bytes(memory.device) // 2):
            self._refuse(least, "without what its batches take")  # too much even to be measured

    def batch(self, leaves: Sequence[torch.Tensor], structure: Structure, *, trains: bool) -> UncutBatch:
        """Return a mini-batch that trains or validates."""
        training, whole = self._training, WholeStep(self._training.cuts.function(training=trains))
        shard = Shard(
            run=lambda *_: (), tensors=(), inputs=(), outputs=(), label="the whole model", writes_buffers=True
        )
        program = ShardProgram(shards=(shard,), rebuild_result=whole.rebuild, fingerprints=("",), whole=whole)
        work = Work(training, self._memory, program, structure, Behaviour(trains=trains))
        is_measured = self._num_steps < _DECIDING_STEPS or can_record(self._memory.device)
        return UncutBatch(work, leaves, is_measured=is_measured)

    def transient_bytes(self, index: int) -> int:  # noqa: ARG002
        """Return the bytes of the whole device."""
        return self._memory.room_bytes

    def remaining_bytes(self, index: int) -> int:  # noqa: ARG002
        """Return the same, because nothing of the job leaves."""
        return self._memory.room_bytes

    def recompute_s(self, index: int) -> float:  # noqa: ARG002
        """Return zero, because nothing runs forward again."""
        return 0.0

    def learn(self, mini: UncutBatch) -> None:
        """Note the peak of a mini-batch. Raises ``BudgetError`` after the deciding steps if they took too much."""
        memory, job = self._memory, self._training.job
        self._most_bytes = max(self._most_bytes, mini.peak_bytes)
        was_deciding = self._num_steps < _DECIDING_STEPS
        self._num_steps += mini.work.steps
        if was_deciding:
            if self._num_steps == _DECIDING_STEPS:
                self.decide()
        elif self._most_bytes > max(memory.room_bytes, self._told_bytes):
            self._told_bytes = 2 * self._most_bytes
            warnings.warn(
                f"job {job.name!r}: a mini-batch of step {self._training.position.step + 1} took "
                f"{self._most_bytes} bytes, above the budget of {memory.budget_bytes} bytes, and more than the first "
                "ones. Training goes on above the budget. Give a larger budget, or smaller batches: "
                "Job(accumulate=4, ...)",
                BudgetNotKeptWarning,
                stacklevel=2,
            )

    def decide(self) -> None:
        """Raise ``BudgetError`` if the steps so far took more than the budget."""
        if self._most_bytes > self._memory.room_bytes and self._num_steps <= _DECIDING_STEPS:
            self._refuse(self._most_bytes + self._most_bytes // _SPARE, "in its first steps")

    def _refuse(self, needed_bytes: int, when: str) -> None:
        least = needed_bytes + self._memory.library_bytes
        raise BudgetError(
            f"`budget` must be at least {least} ({format_bytes(least)}) for job {self._training.job.name!r}, got "
            f"{format_bytes(self._memory.budget_bytes)}: it takes {format_bytes(needed_bytes)} {when}, and it cannot "
            f"be cut, because {self._training.cuts.uncut_because}. {WHAT_WORKS}"
        )


def job_bytes(training: JobTraining, device: torch.device) -> int:
    """Return the bytes that a job which is not cut has on the device: weights, gradients, what its optimizer keeps."""
    tensors = [*training.weights.tensors.values(), *tensors_in(vars(training.optimizer.master))]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    sizes: dict[int, int] = {}
    for tensor in (part for whole in (*tensors, *gradients) for part in _parts(whole)):
        if tensor.device.type == device.type:
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors of which a tensor consists."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, key, None) for key in tensor.__tensor_flatten__()[0]]
        return [part for value in inner if isinstance(value, torch.Tensor) for part in _parts(value)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if tensor.layout is torch.strided else []
