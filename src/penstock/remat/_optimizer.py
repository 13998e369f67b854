"""Bytes of an optimizer's state, also before its first step."""

import torch

from penstock.arguments import checked


@checked("penstock.remat.optimizer_state_bytes(optimizer)")
def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the device bytes of the state of ``optimizer``, as it is, or as it will be after its first step.

    Before the first step, an optimizer of the same class and settings makes its state for small stand-ins. Tensors with
    the shape of their parameter are scaled to the real size. Other state counts only after the first step, if it is a
    tensor of more than one element.
    """
    if optimizer.state:
        return sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
    return sum(_group_bytes(optimizer, group) for group in optimizer.param_groups)


def _group_bytes(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    parameters = group["params"]
    assert isinstance(parameters, list)
    settings = {name: value for name, value in group.items() if name != "params"}
    per_kind: dict[tuple[int, torch.dtype], float] = {}
    total = 0
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype)
        if kind not in per_kind:
            per_kind[kind] = _bytes_per_element(type(optimizer), settings, *kind)
        total += round(per_kind[kind] * parameter.numel())
    return total


def _bytes_per_element(
    optimizer_class: type[torch.optim.Optimizer], settings: dict[str, object], num_dims: int, dtype: torch.dtype
) -> float:
    stand_in = torch.nn.Parameter(torch.zeros((4,) * num_dims, dtype=dtype))
    stand_in.grad = torch.zeros_like(stand_in)
    optimizer = optimizer_class([{"params": [stand_in], **settings}], lr=0.0)  # type: ignore[call-arg]
    optimizer.step()
    return sum(
        value.nbytes / stand_in.numel()
        for value in optimizer.state[stand_in].values()
        if isinstance(value, torch.Tensor) and value.shape == stand_in.shape
    )
