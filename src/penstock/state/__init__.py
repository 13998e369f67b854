"""The engine for a model's state: pages that leave the device and come back, and the plan of a step that moves them.

Pages, which a training works with:

- `Pages`, `PageKind`: storages that are emptied and filled in place. `Copies` moves them, `Replay` follows plans.
- `PageWatch`: sees every operator and fetches its pages; `do_pending`, `do_all_pending` do the updates that are due.
- `Taken`: a model's parameters, gradients and states as pages. `Updates`, `UpdatedBy`: the optimizer's step on them.
- `OthersMeter`: measures what else is on the device. `nbytes_of`: the bytes of a tensor and of what it is made of.
- `StepCache`: the kinds of step of earlier runs of a training.
- `account_of`: the account of a call that takes a budget or tiers one by one.

Plans, without device code:

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

from penstock.state._account import account_of as account_of
from penstock.state._copies import Copies as Copies
from penstock.state._effects import Effect as Effect
from penstock.state._effects import effect_of as effect_of
from penstock.state._meter import OthersMeter as OthersMeter
from penstock.state._modelled import modelled_record as modelled_record
from penstock.state._page import PageKind as PageKind
from penstock.state._pages import Pages as Pages
from penstock.state._past import do_all_pending as do_all_pending
from penstock.state._past import do_pending as do_pending
from penstock.state._plan import PlannedStep as PlannedStep
from penstock.state._plan import StatePlanner as StatePlanner
from penstock.state._plan import best_plan as best_plan
from penstock.state._problem import HostUpdate as HostUpdate
from penstock.state._problem import Rates as Rates
from penstock.state._problem import StateProblem as StateProblem
from penstock.state._problem import StepPage as StepPage
from penstock.state._recalled import StepCache as StepCache
from penstock.state._record import RecordedStorage as RecordedStorage
from penstock.state._record import StepRecord as StepRecord
from penstock.state._replay import Replay as Replay
from penstock.state._schedule import GiveBack as GiveBack
from penstock.state._schedule import PageCopy as PageCopy
from penstock.state._schedule import StatePlan as StatePlan
from penstock.state._simulate import Simulated as Simulated
from penstock.state._simulate import simulate as simulate
from penstock.state._split import best_split as best_split
from penstock.state._step import Place as Place
from penstock.state._step import StepKind as StepKind
from penstock.state._step import plain_s as plain_s
from penstock.state._step import step_problem as step_problem
from penstock.state._taken import Taken as Taken
from penstock.state._taken import nbytes_of as nbytes_of
from penstock.state._updates import UpdatedBy as UpdatedBy
from penstock.state._updates import Updates as Updates
from penstock.state._verify import verify as verify
from penstock.state._watch import PageWatch as PageWatch
