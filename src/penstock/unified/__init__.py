"""Feature tables larger than the device, or than memory, that you index like a tensor (extends PyTorch-Direct).

>>> import torch
>>> from penstock import unified
>>> features = unified.wrap(torch.arange(12.0).view(4, 3))  # host memory that devices read in place
>>> features[torch.tensor([2, 0])]
tensor([[6., 7., 8.],
        [0., 1., 2.]])

- `wrap`, `empty`, `from_file`: make a `UnifiedTensor`; `is_unified` tests for one. `gather` reads rows with more
  options; `advise` tells the driver how its memory is used (`Advice`).
- `place`, `Operand`, `operand_of`, `Preference`: the rules for where an operator with unified operands runs.
- `TieredFeatures`: rows on the device, in host memory and on an SSD under one index; `FeatureStatistics`.
- `plan_tiers`: decides which rows lie where; `TierProblem`, `Peers` (machines that hold a table together),
  `TierPlan`, and `verify`, which checks a plan.
- `expected_accesses`, `count_accesses`: predict what a sampler will read, or count what it has read.
- `write_features`: writes rows to a file that can be read row by row at the disk's rate; `check` verifies its
  checksums.
- `write_graph`, `open_graph`: a graph in a file, sampled where it is, by all processes of a machine.
- `Graph`, `NeighborSampler`, `Sample`, `Block`; `HeteroNeighborSampler`, `HeteroSample` for several types of nodes.
- `Loader`: mini-batches that are sampled and read while the step runs; `Batch`, `LoaderStatistics`. `in_advance` does
  the same for other loaders. `infer` computes the outputs of all nodes, layer by layer.
"""

from penstock.unified._advice import Advice as Advice
from penstock.unified._advice import advise as advise
from penstock.unified._aligned import check as check
from penstock.unified._graph import Graph as Graph
from penstock.unified._graph import count_accesses as count_accesses
from penstock.unified._graph import expected_accesses as expected_accesses
from penstock.unified._graph_file import open_graph as open_graph
from penstock.unified._graph_write import write_graph as write_graph
from penstock.unified._infer import infer as infer
from penstock.unified._load import from_file as from_file
from penstock.unified._loader import Batch as Batch
from penstock.unified._loader import Loader as Loader
from penstock.unified._loader import LoaderStatistics as LoaderStatistics
from penstock.unified._loader import in_advance as in_advance
from penstock.unified._placement import Operand as Operand
from penstock.unified._placement import Preference as Preference
from penstock.unified._placement import operand_of as operand_of
from penstock.unified._placement import place as place
from penstock.unified._plan import TierPlan as TierPlan
from penstock.unified._plan import plan_tiers as plan_tiers
from penstock.unified._problem import Peers as Peers
from penstock.unified._problem import TierProblem as TierProblem
from penstock.unified._sampler import Block as Block
from penstock.unified._sampler import HeteroNeighborSampler as HeteroNeighborSampler
from penstock.unified._sampler import HeteroSample as HeteroSample
from penstock.unified._sampler import NeighborSampler as NeighborSampler
from penstock.unified._sampler import Sample as Sample
from penstock.unified._store import FeatureStatistics as FeatureStatistics
from penstock.unified._tensor import UnifiedTensor as UnifiedTensor
from penstock.unified._tensor import empty as empty
from penstock.unified._tensor import gather as gather
from penstock.unified._tensor import is_unified as is_unified
from penstock.unified._tensor import wrap as wrap
from penstock.unified._tiered import TieredFeatures as TieredFeatures
from penstock.unified._verify import verify as verify
from penstock.unified._write import write_features as write_features
