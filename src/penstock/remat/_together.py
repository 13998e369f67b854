"""Several graphs of one step, planned as one: forward of each in order, then backward of each in reverse.

Every graph has a problem of its own. A step that has run shows what stands between them: which result of one graph is
an argument of a later one. Such a result stays until backward of the later graph has ended, and so does the gradient
that goes the other way. Everything else belongs to one graph, so the decisions of the whole are those of the parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.remat._plan import RematPlan, plan_of
from penstock.remat._problem import Operator, RematProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLink:
    """A result of one graph that is an argument of a later one."""

    source: int
    """The graph that returns it."""
    storage: int
    """Index of the storage in its problem."""
    target: int
    """The graph that takes it."""
    gradient: int | None
    """The storage of its gradient, in the target's problem; ``None`` if it has none of its own."""


def merged(problems: Sequence[RematProblem], links: Sequence[GraphLink], static_bytes: int) -> RematProblem:
    """Merge the problems into one.

    If there are several, nothing is swapped: lanes would run beyond a graph's end.
    """
    if len(problems) == 1:
        return replace(problems[0], static_bytes=static_bytes)
    order = [(graph, index) for graph, problem in enumerate(problems) for index in range(problem.num_forward)]
    for graph in reversed(range(len(problems))):
        problem = problems[graph]
        order += [(graph, index) for index in range(problem.num_forward, len(problem.operators))]
        order.append((graph, -1))  # where the links of the graph end
    numbers = {operator: number for number, operator in enumerate(order)}
    starts = [0]
    for problem in problems:
        starts.append(starts[-1] + len(problem.storages))
    handed_over = {(link.source, link.storage) for link in links}
    gradients = {(link.target, link.gradient) for link in links if link.gradient is not None}
    gradients |= {  # autograd adds them to their leaves once backward of the graph has ended
        (graph, storage)
        for graph, problem in enumerate(problems)
        for operator in problem.operators
        if operator.target == "accumulate"
        for storage in operator.inputs
    }
    storages = tuple(
        replace(
            storage,
            producer=numbers[graph, storage.producer],
            is_output=storage.is_output and (graph, index) not in handed_over | gradients,
        )
        for graph, problem in enumerate(problems)
        for index, storage in enumerate(problem.storages)
    )
    operators = []
    for graph, index in order:
        if index < 0:
            ends = {starts[link.source] + link.storage for link in links if link.target == graph}
            ends |= {
                starts[graph] + storage for target, storage in gradients if target == graph and storage is not None
            }
            operators.append(_end(graph, sorted(ends)))
            continue
        operator = problems[graph].operators[index]
        holds = any((graph, storage) in handed_over for storage in operator.outputs)
        operators.append(
            replace(
                operator,
                name=f"{operator.name} of graph {graph}",
                inputs=tuple(starts[graph] + storage for storage in operator.inputs),
                outputs=tuple(starts[graph] + storage for storage in operator.outputs),
                must_run_once=operator.must_run_once or ("another graph reads it" if holds else ""),
            )
        )
    return RematProblem(
        operators=tuple(operators),
        num_forward=sum(problem.num_forward for problem in problems),
        storages=storages,
        static_bytes=static_bytes,
    )


def plans_of(problems: Sequence[RematProblem], whole: RematPlan) -> tuple[RematPlan, ...]:
    """Return the plan of each graph, from the plan of all of them."""
    starts = [0, *itertools.accumulate(len(problem.storages) for problem in problems)]
    shares = [whole.decisions[start:end] for start, end in itertools.pairwise(starts)]
    return tuple(plan_of(problem, share) for problem, share in zip(problems, shares, strict=True))


def _end(graph: int, inputs: list[int]) -> Operator:
    return Operator(
        name=f"end of graph {graph}",
        target="end",
        inputs=tuple(inputs),
        outputs=(),
        duration_s=0.0,
        must_run_once="an end",
    )
