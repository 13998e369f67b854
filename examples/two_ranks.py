"""Two ranks with activations on disk: DDP, FSDP2 or tensor parallelism, each compared with the same two without it.

    torchrun --nproc-per-node 2 examples/two_ranks.py --how fsdp2 --disk /nvme

Runs on CPUs with gloo. On GPUs, initialize the group with nccl, move the model, and give `host="64GiB"` instead of
`--disk`. Every rank prints whether its losses equal those without Penstock, and how many bytes left its device.
"""

import argparse
import contextlib
import gc

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock
from penstock.testing import GPT
from penstock.units import format_bytes


def ddp(model: nn.Module) -> nn.Module:
    """Every rank has the whole model and its own batch."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Every rank has a part of each parameter, and its own batch."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor(model: nn.Module) -> nn.Module:
    """Every rank has a part of each feed-forward layer, and all have the same batch."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
    return model


HOW = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--how", choices=list(HOW), default="ddp")
    options.add_argument("--disk", default=".", help="a directory on an SSD")
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--steps", type=int, default=4)
    given = options.parse_args()
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)  # the ranks share the cores
    expected, _ = train(given, is_offloaded=False)
    losses, moved = train(given, is_offloaded=True)
    rank = distributed.get_rank()
    print(f"rank {rank}: losses equal: {losses == expected}, {format_bytes(moved)} moved in the last step")
    gc.collect()  # gloo's threads end with the model; Python must not end before them
    distributed.destroy_process_group()


def train(given: argparse.Namespace, *, is_offloaded: bool) -> tuple[list[float], int]:
    """Return the losses of this rank, and the bytes that left the device in the last step."""
    torch.manual_seed(0)
    model = HOW[given.how](GPT(num_layers=4, width=given.width, num_heads=4, context=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offloader = contextlib.nullcontext()
    if is_offloaded:  # each rank makes its own, after the model was wrapped
        offloader = penstock.offload.activations(model, disk=given.disk, min_size="64KiB", max_stall=1.0)
    seed = 0 if given.how == "tensor" else distributed.get_rank()
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(given.steps):
        tokens, targets = torch.randint(256, (2, 8, 128), generator=generator)
        with offloader:
            loss = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not is_offloaded:
        return losses, 0
    moved = offloader.statistics().parked_bytes
    offloader.close()
    return losses, moved


if __name__ == "__main__":
    main()
