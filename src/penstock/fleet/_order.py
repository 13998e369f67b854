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
        self.forward_at = {task.shard: index for index, task in enumerate(self.tasks) if task.kind in _FORWARD}
        self.backward_at = {task.shard: index for index, task in enumerate(self.tasks) if task.kind in _BACKWARD}
        """Per shard, the position of its task."""
        self._readers: dict[str, list[int]] = {}
        self._producer = _producers(work.program)
        for index, shard in enumerate(work.program.shards):
            for name in shard.inputs:
                self._readers.setdefault(name, []).append(index)

    def places_of(self, shard: int) -> list[int]:
        """Return the positions of all tasks of a shard."""
        return [index for index, task in enumerate(self.tasks) if task.shard == shard]

    def readers_of(self, name: str) -> list[int]:
        """Return the positions of the tasks that read a value."""
        readers = self._readers.get(name, ())
        return [places[shard] for shard in readers for places in (self.forward_at, self.backward_at) if shard in places]

    def consumers_of(self, gradient: str) -> list[int]:
        """Return the position of the task that consumes the gradient of a value or of a tied parameter."""
        if gradient.startswith(TIED):
            producer = self._work.training.groups.by_name[gradient.removeprefix(TIED)].owner
        else:
            producer = self._producer.get(gradient, -1)
        return [self.backward_at[producer]] if producer in self.backward_at else []


def _tasks(work: Work) -> list[Task]:
    last = len(work.program.shards) - 1
    if not work.behaviour.trains:
        return [Task(UnitKind.FORWARD, shard) for shard in range(last + 1)]
    tasks = [Task(UnitKind.FORWARD, shard) for shard in range(last)]
    tasks += [Task(UnitKind.FUSED, last), *(Task(UnitKind.BACKWARD, shard) for shard in reversed(range(last)))]
    if work.steps and work.steps_apart:
        tasks += [Task(UnitKind.STEP, shard) for shard in range(last + 1)]
    return tasks


def _producers(program: ShardProgram) -> dict[str, int]:
    """Return, per value, the first shard that hands it on."""
    producers: dict[str, int] = {}
    for index, shard in enumerate(program.shards):
        for name in shard.outputs:
            producers.setdefault(name, index)
    return producers


_FORWARD = (UnitKind.FORWARD, UnitKind.FUSED)
_BACKWARD = (UnitKind.FUSED, UnitKind.BACKWARD)
