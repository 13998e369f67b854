"""Order of the units of a mini-batch, and the units that work on a shard or a value."""

from penstock.fleet._autograd import TIED
from penstock.fleet._problem import Task, UnitKind
from penstock.fleet._program import ShardProgram
from penstock.fleet._work import Work


class TaskOrder:
    """The tasks of one mini-batch of a model that was cut.

    They are forward of every shard but the last, forward and backward of the last together, and backward of the others.
    If the optimizer has to wait for the norm of all gradients, or if the host steps, a step of every shard follows.
    """

    def __init__(self, work: Work):
        self._work = work
        self.tasks = _tasks(work)
        self.forward_at = {task.shard: at for at, task in enumerate(self.tasks) if task.kind in _FORWARD}
        self.backward_at = {task.shard: at for at, task in enumerate(self.tasks) if task.kind in _BACKWARD}
        """Per shard, the position of its task."""
        self._readers: dict[str, list[int]] = {}
        self._producer = _producers(work.program)
        for at, shard in enumerate(work.program.shards):
            for name in shard.inputs:
                self._readers.setdefault(name, []).append(at)

    def places_of(self, shard: int) -> list[int]:
        """Return the positions of all tasks of a shard."""
        return [at for at, task in enumerate(self.tasks) if task.shard == shard]

    def readers_of(self, name: str) -> list[int]:
        """Return the positions of the tasks that read a value."""
        readers = self._readers.get(name, ())
        return [places[at] for at in readers for places in (self.forward_at, self.backward_at) if at in places]

    def consumers_of(self, gradient: str) -> list[int]:
        """Return the position of the task that consumes the gradient of a value or of a tied parameter."""
        if gradient.startswith(TIED):
            producer = self._work.training.group_of[gradient.removeprefix(TIED)].owner
        else:
            producer = self._producer.get(gradient, -1)
        return [self.backward_at[producer]] if producer in self.backward_at else []


def _tasks(work: Work) -> list[Task]:
    last = len(work.program.shards) - 1
    if not work.behaviour.trains:
        return [Task(UnitKind.FORWARD, at) for at in range(last + 1)]
    tasks = [Task(UnitKind.FORWARD, at) for at in range(last)]
    tasks += [Task(UnitKind.FUSED, last), *(Task(UnitKind.BACKWARD, at) for at in reversed(range(last)))]
    if work.steps and work.steps_apart:
        tasks += [Task(UnitKind.STEP, at) for at in range(last + 1)]
    return tasks


def _producers(program: ShardProgram) -> dict[str, int]:
    """Return, per value, the first shard that hands it on."""
    found: dict[str, int] = {}
    for at, shard in enumerate(program.shards):
        for name in shard.outputs:
            found.setdefault(name, at)
    return found


_FORWARD = (UnitKind.FORWARD, UnitKind.FUSED)
_BACKWARD = (UnitKind.FUSED, UnitKind.BACKWARD)
