"""Penstock in other libraries. Each of them is an extra, and is imported when it is first needed.

- `PenstockCallback`, `PenstockArguments`: Hugging Face's Trainer under a byte budget (`hf` extra).
- `offloading`: the same around a loop written with Accelerate; it yields a `LoopOffloader` (`hf` extra).
- `LightningOffload`: the same for Lightning's Trainer (`lightning` extra). `OffloadSummary` says what a run did.
- `OptunaStopper`: one of Optuna's pruners stops jobs early (`fleet` extra).
- `search`: Optuna's sampler chooses the next jobs while others train (`fleet` extra).
- `TensorBoardTracker`: losses, validations and tags in TensorBoard (`fleet` extra).
- `MLflowTracker`: the same as runs of an MLflow experiment (`mlflow` extra).
- `pyg_sampler`, `pyg_features`: samplers and tiered features for PyG's loaders (`gnn` extra).
- `offloading_of_the_rest`: how `penstock.remat.compile` moves what a step saves outside of its planned graphs.
- `run_on_ray`: a fleet over several machines (`ray` extra).
"""

from penstock.integrations._accelerate import offloading as offloading
from penstock.integrations._hugging_face import PenstockArguments as PenstockArguments
from penstock.integrations._hugging_face import PenstockCallback as PenstockCallback
from penstock.integrations._lightning import LightningOffload as LightningOffload
from penstock.integrations._mlflow import MLflowTracker as MLflowTracker
from penstock.integrations._offloading import LoopOffloader as LoopOffloader
from penstock.integrations._offloading import OffloadSummary as OffloadSummary
from penstock.integrations._optuna import OptunaStopper as OptunaStopper
from penstock.integrations._optuna import search as search
from penstock.integrations._planned import offloading_of_the_rest as offloading_of_the_rest
from penstock.integrations._pyg import pyg_features as pyg_features
from penstock.integrations._pyg import pyg_sampler as pyg_sampler
from penstock.integrations._ray import run_on_ray as run_on_ray
from penstock.integrations._tensorboard import TensorBoardTracker as TensorBoardTracker
