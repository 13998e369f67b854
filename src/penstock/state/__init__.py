"""One step of a model whose state does not fit the device: its order, a plan, and a check of it. No device code.

- `effect_of`, `Effect`: which storages an operator reads, writes and makes.
- `StepRecord`, `RecordedStorage`: operators with their times, and storages with their uses.
- `modelled_record`: the record of a step on a machine that is not available.
- `StepKind`, `Place`, `step_problem`: a step with its updates, as a problem. `plain_s`: its time if everything fits.
- `StateProblem`, `StepPage`, `HostUpdate`, `Rates`: what the planner knows.
- `best_plan`, `best_split`: the fastest plan, and how much of the updates the host takes. `StatePlanner`: one plan.
- `StatePlan`, `PageCopy`, `GiveBack`, `PlannedStep`: what moves when, and when its memory is free.
- `simulate`, `Simulated`: how long such a step takes.
- `verify`: whether a plan is correct, by what must have happened before what.
"""

from penstock.state._copies import GiveBack as GiveBack
from penstock.state._copies import PageCopy as PageCopy
from penstock.state._copies import StatePlan as StatePlan
from penstock.state._effects import Effect as Effect
from penstock.state._effects import effect_of as effect_of
from penstock.state._modelled import modelled_record as modelled_record
from penstock.state._plan import PlannedStep as PlannedStep
from penstock.state._plan import StatePlanner as StatePlanner
from penstock.state._plan import best_plan as best_plan
from penstock.state._problem import HostUpdate as HostUpdate
from penstock.state._problem import Rates as Rates
from penstock.state._problem import StateProblem as StateProblem
from penstock.state._problem import StepPage as StepPage
from penstock.state._record import RecordedStorage as RecordedStorage
from penstock.state._record import StepRecord as StepRecord
from penstock.state._simulate import Simulated as Simulated
from penstock.state._simulate import simulate as simulate
from penstock.state._split import best_split as best_split
from penstock.state._step import Place as Place
from penstock.state._step import StepKind as StepKind
from penstock.state._step import plain_s as plain_s
from penstock.state._step import step_problem as step_problem
from penstock.state._verify import verify as verify
