"""Offload activations, or all state of a training, to host memory or SSD and fetch them before they are used
(SSDTrain).

- `activations(model, disk=..., host=..., budget=...)` makes an `Offloader`; `wrap(module, ...)` an `OffloadedModule`.
- `training(model, optimizer, budget, disk=..., host=...)` makes a `Training`: it offloads parameters, gradients,
  optimizer state and activations in your own training loop. `parameters` does the same without activations.
  `TrainingStatistics` says what it did, `Held` what was on the device at a time. `load(model, path)` fills a model on
  `torch.device("meta")` from files, one tensor at a time.
- `OffloadStatistics` says what a step did. `Policy` is a rule of your own, and `SavedTensor` what the rule sees.
- `modelled_cycle` makes the problem of a step on a machine that is not available.
- `OffloadProblem`, `SavedStorage` -> `plan` -> `OffloadPlan`, `Transfer`: the pure planner; `verify` checks its plans.
"""

from penstock.offload._modelled import modelled_cycle as modelled_cycle
from penstock.offload._plan import OffloadPlan as OffloadPlan
from penstock.offload._plan import Transfer as Transfer
from penstock.offload._plan import plan as plan
from penstock.offload._policy import Policy as Policy
from penstock.offload._policy import SavedTensor as SavedTensor
from penstock.offload._problem import OffloadProblem as OffloadProblem
from penstock.offload._problem import SavedStorage as SavedStorage
from penstock.offload._run import OffloadedModule as OffloadedModule
from penstock.offload._run import Offloader as Offloader
from penstock.offload._run import activations as activations
from penstock.offload._run import wrap as wrap
from penstock.offload._statistics import OffloadStatistics as OffloadStatistics
from penstock.offload._verify import verify as verify
from penstock.training import Held as Held
from penstock.training import Training as Training
from penstock.training import TrainingStatistics as TrainingStatistics
from penstock.training import load as load
from penstock.training import parameters as parameters
from penstock.training import training as training
