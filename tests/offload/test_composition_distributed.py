"""Offloading beside PyTorch's parallelisms: two processes on gloo, compared to the same two without offloading."""

import contextlib
import datetime as dt
from unittest import mock

import pytest
import torch
from _helpers import (
    OPTIONS,
    Mlp,
    assert_moved,
    assert_nothing_leaked,
    assert_trains_equal,
    everything_parked,
    mlp_loss,
    plain,
    settle,
)
from torch import distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from penstock import offload
from penstock.tiers import Waterfall
from ranks import NUM_RANKS, run_in_ranks


def step_on_own_batch(rank):
    """The ordinary step, with another batch in every process."""

    def step(model, index, settle):
        torch.manual_seed(1000 * rank + index)
        loss = mlp_loss(model)
        settle()
        loss.backward()
        return loss.detach()

    return step


def no_weights(seen, weights):
    """Whether nothing that was seen has the shape of a weight or of its transpose."""
    shapes = {shape for weight in weights for shape in (tuple(weight), tuple(weight)[::-1])}
    return not [tensor for tensor in seen if tensor.shape in shapes]


# ------------------------------------------------------------------------------------------------------ data parallel


def data_parallel(rank, disk):
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        build = lambda options=options: nn.parallel.DistributedDataParallel(Mlp(), **options)  # noqa: E731
        assert_trains_equal(build, step_on_own_batch(rank), disk)


def data_parallel_accumulates(rank, disk):
    def step(model, index, settle):
        torch.manual_seed(1000 * rank + index)
        total = torch.zeros(())
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = mlp_loss(model)
                settle()
                loss.backward()
            total += loss.detach()
        return total

    def build():
        call = lambda block, x: checkpoint(block, x, use_reentrant=False)  # noqa: E731
        return nn.parallel.DistributedDataParallel(Mlp(call=call))

    assert_trains_equal(build, step, disk, follows_plan=False)


def wrapped_inside_data_parallel(rank, disk):
    step, made = step_on_own_batch(rank), []

    def build(wrapper):
        made.append(nn.parallel.DistributedDataParallel(wrapper(Mlp())))
        return made[-1]

    runs = []
    for wrapper in (lambda module: module, lambda module: offload.wrap(module, disk=disk, **OPTIONS)):
        torch.manual_seed(1)
        model = build(wrapper)
        pause = (lambda: settle(made[-1].module.offloader)) if len(made) > 1 else (lambda: None)
        runs.append([])
        for index in range(4):
            model.zero_grad()
            runs[-1].append(step(model, index, pause))
            runs[-1] += [parameter.grad.clone() for parameter in model.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))
    offloader = made[-1].module.offloader
    assert_nothing_leaked(offloader)
    assert_moved(offloader)
    offloader.close()


# -------------------------------------------------------------------------------------------------------- fully sharded


def fully_sharded(rank, disk):
    """The gathered parameters are FSDP's to free and to gather again; only activations are parked."""
    weights = [parameter.shape for parameter in Mlp().parameters()]
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        for reshard in (True, False):
            for call in (None, lambda block, x: checkpoint(block, x, use_reentrant=False)):

                def build(policy=policy, reshard=reshard, call=call):
                    model = Mlp(call=call)
                    options = {"mp_policy": policy, "reshard_after_forward": reshard}
                    for block in model.blocks:
                        fully_shard(block, mesh=init_device_mesh("cpu", (NUM_RANKS,)), **options)
                    return fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)), **options)

                seen = []
                keep = lambda tensor, seen=seen: not seen.append(tensor)  # noqa: E731
                assert_trains_equal(build, step_on_own_batch(rank), disk, policy=keep)
                assert seen
                assert no_weights(seen, weights)


def fully_sharded_after_the_offloader_was_made(rank, disk):
    """Sharding replaces the parameters; the next step looks at the new ones."""
    weights, seen, runs = [parameter.shape for parameter in Mlp().parameters()], [], []
    for is_offloaded in (False, True):
        torch.manual_seed(1)
        model = Mlp()
        policy = lambda tensor: not seen.append(tensor)  # noqa: E731
        offloader = offload.activations(model, disk=disk, policy=policy, **OPTIONS) if is_offloaded else None
        pause = (lambda offloader=offloader: settle(offloader)) if offloader else (lambda: None)
        runs.append([])
        with everything_parked():
            for index in range(5):
                if index == 2:
                    for block in model.blocks:
                        fully_shard(block, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
                model.zero_grad()
                with offloader or contextlib.nullcontext():
                    runs[-1].append(step_on_own_batch(rank)(model, index, pause))
                runs[-1] += [plain(parameter.grad) for parameter in model.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))
    assert no_weights(seen, weights)
    del model
    assert_nothing_leaked(offloader)
    assert_moved(offloader)
    offloader.close()


# ------------------------------------------------------------------------------------------------------ tensor parallel


class Normed(Mlp):
    """With norms and products between the linear layers, so that distributed tensors themselves are saved."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        x = self.embed(x).view(4, 24, 32)
        for block in self.blocks:
            x = x + block(self.norm(x)).tanh()
        return self.head(x)


def tensor_parallel(rank, disk):
    def build():
        model = Mlp()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model

    run = assert_trains_equal(build, step_on_own_batch(0), disk)
    hidden_bytes = 3 * 96 * 64 // NUM_RANKS * 4  # of each block: what GELU saves, and what the next layer saves
    assert run.statistics[-1].saved_bytes > 2 * hidden_bytes


def tensor_parallel_with_distributed_activations(rank, disk):
    seen = []

    def build():
        model = Normed()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.blocks:
            plan = {
                "0": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
        plan = {
            "embed": ColwiseParallel(output_layouts=Replicate()),
            "norm": SequenceParallel(),
            "head": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
        }
        parallelize_module(model, mesh, plan)
        return model

    def step(model, index, settle):
        torch.manual_seed(index)
        x = model.embed(torch.randn(96, 16)).view(4, 24, 32)
        x = DTensor.from_local(x, model.norm.weight.device_mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        for block in model.blocks:
            x = x + block(model.norm(x)).tanh()
        assert isinstance(x, DTensor)
        loss = model.head(x).square().mean()
        settle()
        loss.backward()
        return loss.detach()

    assert_trains_equal(build, step, disk, policy=lambda tensor: not seen.append(tensor))
    assert (4, 24 // NUM_RANKS, 32) in {tensor.shape for tensor in seen}  # the local parts


def unfinished_collective(rank, disk):
    """The result of a collective is saved before its bytes have come: it must not leave without them.

    The second process joins the collective only when the first has parked its result, or waits for it.
    """
    store = distributed.FileStore(str(disk.parent / "order"), NUM_RANKS)
    park = Waterfall.park

    def park_and_tell(waterfall, storage, label=""):
        handle = park(waterfall, storage, label)
        waterfall.drain()
        store.set("parked", "yes")
        return handle

    parameter = nn.Parameter(torch.full((64, 64), 2.0))
    offloader = offload.activations(nn.ParameterList([parameter]), disk=disk, **OPTIONS)
    batch = torch.full((64, 64), rank + 1.0)
    if rank == 1:
        with contextlib.suppress(distributed.DistStoreError, RuntimeError):
            store.wait(["parked"], dt.timedelta(seconds=2))
    with offloader, mock.patch.object(Waterfall, "park", park_and_tell) if rank == 0 else contextlib.nullcontext():
        whole = collectives.all_gather_tensor(batch, 0, distributed.group.WORLD)
        loss = (whole @ parameter).sum()
        del whole
        settle(offloader)
        loss.backward()
    expected = torch.full((64, 64), 64.0 * (1 + 2))
    assert torch.equal(parameter.grad, expected), f"{parameter.grad[0, 0]} instead of {expected[0, 0]}"
    del loss
    assert_nothing_leaked(offloader)
    offloader.close()


# ------------------------------------------------------------------------------------------------------------- pipeline


class Stage(nn.Module):
    """One of two stages; ``pause`` is called after the forward of every micro-batch."""

    def __init__(self, rank):
        super().__init__()
        self.layers = nn.Sequential(*(Mlp().blocks if rank else [nn.Linear(16, 32), *Mlp().blocks]))
        self.pause = lambda: None

    def forward(self, x):
        x = self.layers(x)
        self.pause()
        return x


def pipelined(schedule_type, rank, disk):
    schedules = []

    def build():
        stage = Stage(rank)
        pipeline_stage = pipelining.PipelineStage(stage, rank, NUM_RANKS, torch.device("cpu"))
        schedules.append(schedule_type(pipeline_stage, n_microbatches=4, loss_fn=nn.functional.mse_loss))
        return stage

    def step(model, index, settle):
        model.pause = settle
        torch.manual_seed(index)
        batch, target, losses = torch.randn(96, 16), torch.randn(96, 32), []
        if rank == 0:
            schedules[-1].step(batch)
        else:
            schedules[-1].step(target=target, losses=losses)
        return torch.stack([loss.detach() for loss in losses]) if losses else torch.zeros(())

    def check(offloader):
        assert offloader.statistics().num_steps >= 3

    assert_trains_equal(build, step, disk, check=check, follows_plan=False)


def one_forward_one_backward(rank, disk):
    pipelined(pipelining.Schedule1F1B, rank, disk)


def forwards_then_backwards(rank, disk):
    pipelined(pipelining.ScheduleGPipe, rank, disk)


def _with_own_disk(rank, function, directory):
    disk = directory / f"disk {rank}"
    disk.mkdir()
    function(rank, disk)


@pytest.mark.parametrize(
    "function",
    [
        data_parallel,
        data_parallel_accumulates,
        wrapped_inside_data_parallel,
        fully_sharded,
        fully_sharded_after_the_offloader_was_made,
        tensor_parallel,
        tensor_parallel_with_distributed_activations,
        unfinished_collective,
        one_forward_one_backward,
        forwards_then_backwards,
    ],
    ids=lambda function: function.__name__,
)
def test_two_processes(tmp_path, function):
    run_in_ranks(_with_own_disk, function, tmp_path, directory=tmp_path)
