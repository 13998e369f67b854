"""Accumulation shard by shard: all mini-batches of a step pass one shard before the next.

A step of ``k`` mini-batches fetches each shard twice instead of ``2 k`` times, and its gradients leave only once they
are complete. In exchange, the values between shards of all mini-batches exist at once. Sums are bit-identical to those
of one mini-batch after the other, because a shard's gradients are added in the same order.
"""

from collections.abc import Sequence

from penstock.fleet._pilot import ShardMeasure
from penstock.fleet._program import ShardProgram
from penstock.fleet._training import JobTraining


def is_possible(training: JobTraining, program: ShardProgram, measures: Sequence[ShardMeasure]) -> bool:
    """Whether the order of mini-batches makes no difference to any shard.

    It does if operators draw random numbers, which must be drawn mini-batch by mini-batch; if a shard writes to buffers
    that another one reads; or if the model is run whole.
    """
    if (
        program.whole is not None
        or training.cuts.tree is not None
        or not all(shard.draws_nothing for shard in measures)
    ):
        return False
    for index, shard in enumerate(program.shards):
        written = set(shard.tensors) if shard.writes_buffers else set()
        others = {name for other, layers in enumerate(program.shards) if other != index for name in layers.tensors}
        if any(training.groups.by_name[name].kind == "buffer" for name in written & others):
            return False
    return True


def is_cheaper(measures: Sequence[ShardMeasure], num_batches: int, room_bytes: int) -> bool:
    """Whether accumulation shard by shard moves fewer bytes.

    It moves values between shards out and in, instead of shards and their gradients.
    """
    parameters = sum(shard.parameter_bytes for shard in measures)
    gradients = sum(shard.accumulated_bytes for shard in measures)
    whole = parameters + gradients + sum(shard.state_bytes for shard in measures)
    if whole + max(shard.backward_bytes for shard in measures) <= room_bytes:
        return False  # nothing of it ever leaves
    return 2 * num_batches * handed_bytes(measures) < 2 * (num_batches - 1) * (parameters + gradients)


def handed_bytes(measures: Sequence[ShardMeasure]) -> int:
    """Return the bytes of one mini-batch's values between shards."""
    return sum(shard.boundary_bytes for shard in measures)


def parked_bytes(measures: Sequence[ShardMeasure], saves: Sequence[bool], num_batches: int) -> int:
    """Return the most bytes that all mini-batches have at once, on the device or below it, beyond those of one."""
    activations = sum(shard.activation_bytes for shard, keeps in zip(measures[:-1], saves, strict=False) if keeps)
    return (num_batches - 1) * (handed_bytes(measures) + activations)
