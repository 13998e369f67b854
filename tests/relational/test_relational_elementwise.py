"""Every element-wise function of the table in every emitter, with its gradient; Triton runs in a process of its own."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from relational_layers import application_of, operands_of, random_graph, summed

from penstock import relational
from penstock.errors import InternalError
from penstock.relational import _elementwise, _language
from penstock.relational._elementwise import FUNCTIONS

STEPS = {"equal", "greater", "is_largest", "stop_gradient"}
"""Functions that no gradient passes."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("emitter", ["eager", "c"])
def test_results_and_gradients_are_those_of_pytorch(name, emitter):
    record = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    graph = random_graph(7, 30, 3, generator)
    compiled = application_of(record).with_options(emitter=emitter)
    operands = operands_of(record, graph, torch.float64, generator)
    wanted = [operand.requires_grad_(record.derivative is not None) for operand in operands[: record.num_operands]]
    ends = [operand[end] for operand, end in zip(operands, graph.edge_index, strict=True)][: record.num_operands]
    value = record.eager(ends, 0.25)
    value = value.detach() if name in STEPS else value
    expected = (summed(value, graph.edge_index[1], graph.num_targets), value)
    actual = compiled(graph, *operands)
    torch.testing.assert_close(actual, expected)
    if record.derivative is not None:
        weights = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in expected]
        mine, theirs = (
            torch.autograd.grad(
                sum((value * weight).sum() for value, weight in zip(results, weights, strict=True))
                + 0 * sum(wanted).sum(),
                wanted,
            )
            for results in (actual, expected)
        )
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", [name for name, record in FUNCTIONS.items() if record.derivative is None])
def test_slopes_are_not_differentiated(name):
    graph = random_graph(7, 30, 3, torch.Generator().manual_seed(0))
    with pytest.raises(InternalError, match=f"{name} has no derivative"):
        application_of(FUNCTIONS[name])(graph, torch.ones(7, 3, requires_grad=True), torch.ones(7, 3))


def test_every_function_is_reached():
    """By the language, by a derivative, or by a rule of differentiation."""
    folder = Path(inspect.getfile(relational)).parent
    texts = {
        node.value
        for path in folder.glob("*.py")
        if path.name != Path(_elementwise.__file__).name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    in_derivatives = inspect.getsource(_elementwise)
    unused = [
        name
        for name in FUNCTIONS
        if name not in texts and f'_slope("{name}")' not in in_derivatives and f'apply("{name}"' not in in_derivatives
    ]
    assert not unused


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if hasattr(_language, name)])
def test_functions_of_the_language_are_on_the_map_with_a_docstring(name):
    assert getattr(relational, name) is getattr(_language, name)
    assert getattr(relational, name).__doc__
