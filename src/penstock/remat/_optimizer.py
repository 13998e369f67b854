"""Bytes that an optimizer's state takes, also before its first step."""

import torch

from penstock.arguments import checked


@checked("penstock.remat.optimizer_state_bytes(optimizer)")
def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Device bytes of the state of ``optimizer``, as it is, or as it will be after its first step.

    Before the first step an optimizer of the same class and settings makes one on small stand-ins; what has the shape
    of its parameter is scaled to the real one. State that is no tensor of its parameter's shape counts as it is there.
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
