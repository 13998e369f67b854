"""The user's own loop around a model whose state does not fit the device. Its public door is `penstock.offload`.

- `training(model, optimizer, budget, ...)` and `parameters`, the same without activations, make a `Training`: it takes
  the model and the optimizer over, and guards, counts and measures the steps. What moves is in `penstock.state`.
- `TrainingStatistics` says what it did, `Held` what was on the device at a time.
- `load(model, path)` fills a model on ``torch.device("meta")`` from files, one tensor at a time.
"""

from penstock.training._load import load as load
from penstock.training._statistics import Held as Held
from penstock.training._statistics import TrainingStatistics as TrainingStatistics
from penstock.training._training import Training as Training
from penstock.training._training import parameters as parameters
from penstock.training._training import training as training
