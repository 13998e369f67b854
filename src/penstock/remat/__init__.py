"""One budget in bytes: a plan that keeps, recomputes or swaps every storage of a training step (Libra).

- `compile`: a model that trains within a budget, whatever shapes come and wherever its graph breaks; it returns a
  `CompiledModule`, or a `CompiledFunction` for a function.
- `optimize`: a step planned for a budget before it runs; it returns an `OptimizedStep`, whose `.plan` is a `Planned`.
- `max_batch`: the largest batch that a budget takes.
- `RematProblem`, `Operator`, `Storage`: a step as the planner sees it, saved to and loaded from a file.
- `plan`, `pareto`, `smallest_budget_bytes`: a `RematPlan` for one budget or many, made of `Decision`s; `Method` says
  what it may use.
- `verify`, `live_bytes`: an independent check of a plan, and what is held while each operator runs.
- `optimizer_state_bytes`: what an optimizer holds, or will after its first step.
- `compile_backend`: what ``torch.compile(backend="penstock")`` calls; `Backend`: one that can be closed.
"""

from penstock.remat._door import Backend as Backend
from penstock.remat._door import CompiledFunction as CompiledFunction
from penstock.remat._door import CompiledModule as CompiledModule
from penstock.remat._door import compile as compile  # noqa: A004
from penstock.remat._door import compile_backend as compile_backend
from penstock.remat._explain import Planned as Planned
from penstock.remat._optimizer import optimizer_state_bytes as optimizer_state_bytes
from penstock.remat._plan import RematPlan as RematPlan
from penstock.remat._plan import pareto as pareto
from penstock.remat._plan import plan as plan
from penstock.remat._plan import smallest_budget_bytes as smallest_budget_bytes
from penstock.remat._problem import Decision as Decision
from penstock.remat._problem import Method as Method
from penstock.remat._problem import Operator as Operator
from penstock.remat._problem import RematProblem as RematProblem
from penstock.remat._problem import Storage as Storage
from penstock.remat._run import OptimizedStep as OptimizedStep
from penstock.remat._run import max_batch as max_batch
from penstock.remat._run import optimize as optimize
from penstock.remat._verify import live_bytes as live_bytes
from penstock.remat._verify import verify as verify
