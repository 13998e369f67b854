"""HGT against PyG's, weights and all."""

import pytest
import torch

from penstock.relational import HGTConv, RelationalGraph


@pytest.mark.parametrize(
    ("widths", "heads"), [(8, 1), ({"a": 8, "b": 6, "c": 12}, 2), (12, 3)], ids=["same", "different", "residual"]
)
def test_hgt_is_pygs(pyg, widths, heads):
    sizes = {"a": 10, "b": 7, "c": 4}
    types = [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"), ("c", "w", "a")]
    generator = torch.Generator().manual_seed(0)
    edges = {
        kind: torch.stack([torch.randint(sizes[end], (25,), generator=generator) for end in (kind[0], kind[2])])
        for kind in types
    }
    theirs = pyg.HGTConv(widths, 12, (list(sizes), types), heads=heads).double()
    ours = HGTConv(widths, 12, (list(sizes), types), heads=heads).double()
    ours.load_state_dict(theirs.state_dict())
    width_of = widths if isinstance(widths, dict) else dict.fromkeys(sizes, widths)
    xs = {name: torch.randn(size, width_of[name]).double().requires_grad_() for name, size in sizes.items()}
    others = {name: tensor.detach().clone().requires_grad_() for name, tensor in xs.items()}
    actual, expected = ours(xs, edges), theirs(others, edges)
    assert actual.keys() == expected.keys()
    for results in (actual, expected):
        sum((tensor**2).sum() for tensor in results.values()).backward()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor)
    for name in sizes:
        torch.testing.assert_close(xs[name].grad, others[name].grad)
    mine = dict(ours.named_parameters())
    for name, tensor in theirs.named_parameters():
        assert (mine[name].grad is None) == (tensor.grad is None)
        if tensor.grad is not None:
            torch.testing.assert_close(mine[name].grad, tensor.grad)
    if not isinstance(widths, dict):
        whole = ours(torch.cat([tensor.detach() for tensor in xs.values()]), RelationalGraph.from_types(edges, sizes))
        torch.testing.assert_close(whole.split(list(sizes.values()))[0], actual["a"])
