"""A byte budget for a training step: a plan that keeps, recomputes or swaps every storage of the step (after Libra).

- `compile`: a model that trains within a budget, for any shapes and any graph breaks. It returns a `CompiledModule`, or
  a `CompiledFunction` for a function.
- `optimize`: a step that is planned for a budget before it runs. It returns an `OptimizedStep`, whose `.plan` is a
  `Planned`.
- `max_batch`: the largest batch that fits a budget.
- `RematProblem`, `Operator`, `Storage`: a step as the planner sees it, which can be saved to a file and loaded.
- `plan`, `pareto`, `smallest_budget_bytes`: a `RematPlan` for one budget or many, made of `Decision`s. `Method` says
  what a plan may use. `least_extra_s`: a bound that no plan for a budget can be below.
- `verify`, `live_bytes`: an independent check of a plan, and the bytes that are held while each operator runs.
- `optimizer_state_bytes`: the bytes that an optimizer holds, or will hold after its first step.
- `compile_backend`: what ``torch.compile(backend="penstock")`` calls. `Backend`: a backend that can be closed.
"""

from penstock.remat._bound import least_extra_s as least_extra_s
from penstock.remat._decision import Decision as Decision
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
from penstock.remat._problem import Method as Method
from penstock.remat._problem import Operator as Operator
from penstock.remat._problem import RematProblem as RematProblem
from penstock.remat._problem import Storage as Storage
from penstock.remat._run import OptimizedStep as OptimizedStep
from penstock.remat._run import max_batch as max_batch
from penstock.remat._run import optimize as optimize
from penstock.remat._verify import live_bytes as live_bytes
from penstock.remat._verify import verify as verify
