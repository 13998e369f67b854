"""How an operator of PyTorch uses its arguments, told by its name and its schema."""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

aten: Any = torch.ops.aten


def rows_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the table and the row numbers if the operator reads rows by number; else ``None``."""
    if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0] is not None:
        table, index = args[0], args[1][0]
        if index.dtype in (torch.bool, torch.uint8):
            return None
    elif func is aten.index_select.default and args[1] in (0, -args[0].dim()) and args[2].dim() == 1:
        table, index = args[0], args[2]
    elif func is aten.embedding.default:
        table, index = args[0], args[1]
    else:
        return None
    if kwargs.get("out") is not None or not table.dim():
        return None
    return (table, index) if is_row_numbers(index) else None


def is_row_numbers(index: torch.Tensor) -> bool:
    """Return whether the type and the device are those of row numbers that our kernels take."""
    return index.dtype in (torch.int64, torch.int32) and (index.is_cpu or index.is_cuda)


def is_view(func: Any) -> bool:
    """Return whether the result shares the memory of an operand, and nothing is read or written."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def written_ids(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that the operator writes to."""
    written: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {id(leaf) for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)}
    return written


def out_ids(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors given as ``out=`` that are not operands as well."""
    outs = [
        kwargs.get(argument.name)
        for argument in func._schema.arguments
        if argument.kwarg_only and argument.alias_info is not None
    ]
    operands = [id(leaf) for leaf in tree_flatten(args)[0]]
    return {id(out) for out in outs if isinstance(out, torch.Tensor) and id(out) not in operands}
