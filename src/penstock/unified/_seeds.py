"""Conversion of the seeds that users give: node numbers, or a mask of all nodes."""

from typing import Any

import torch


def as_seeds(seeds: Any, num_nodes: int) -> torch.Tensor:
    """Return node numbers ``int64 [seeds]`` from numbers of any shape, or from a mask ``bool [num_nodes]``.

    Raises ``IndexError`` for seeds that are not nodes and masks of another length, ``TypeError`` for anything but a
    tensor of whole numbers.
    """
    if not isinstance(seeds, torch.Tensor):
        raise TypeError(f"`seeds` must be a tensor of node numbers, got {type(seeds).__name__}: torch.as_tensor(seeds)")
    if seeds.dtype is torch.bool:
        if tuple(seeds.shape) != (num_nodes,):
            raise IndexError(
                f"a mask of seeds must have one entry for each of {num_nodes} nodes, got {tuple(seeds.shape)}: "
                "mask = torch.zeros(num_nodes, dtype=torch.bool); mask[nodes] = True"
            )
        seeds = seeds.nonzero()
    if seeds.dtype is torch.uint8:
        raise TypeError("`seeds` must not be uint8, which could mean numbers or a mask: seeds.long(), or seeds.bool()")
    if seeds.numel() and (seeds.dtype.is_floating_point or seeds.dtype.is_complex):
        raise TypeError(f"`seeds` must be whole numbers, got {seeds.dtype}: seeds.long()")
    nodes: torch.Tensor = seeds.reshape(-1).to(torch.int64).contiguous()
    if len(nodes) and (int(nodes.min()) < 0 or int(nodes.max()) >= num_nodes):
        raise IndexError(
            f"`seeds` must be from 0 to {num_nodes - 1}, got numbers from {int(nodes.min())} to {int(nodes.max())}"
        )
    return nodes
