"""Compiled relational graph layers that do not store a message per edge where an index suffices.

They extend Hector (ASPLOS 2024). Ready-made layers take PyG's arguments, or a graph that keeps its indexes:

>>> import torch
>>> from penstock.relational import RGCNConv, RelationalGraph
>>> graph = RelationalGraph(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 0]))
>>> RGCNConv(4, 8, num_relations=2)(torch.randn(3, 4), graph).shape
torch.Size([3, 8])

- `RGCNConv`, `RGATConv`, `HGTConv`: like PyG's, also numerically; `CompGCNConv`, `SimpleHGNConv`, `RGraphSAGEConv`.
- `RelationalGraph`: edges with types, from tensors, PyG or DGL; `read_ntriples` (returns `Triples`) and `read_id_file`.
- `layer`: compiles a layer of your own, a Python function over an edge and a node; `Layer` is the result, `Options` are
  its settings.
- The language: `dot`, `concat`, `softmax`, `dropout`, `maximum`, and `exp`, `log`, `sqrt`, `tanh`, `sigmoid`, `relu`,
  `leaky_relu`, `elu`, `gelu`.

A layer is traced to an IR over domains (`_domain`, `_ir`), rewritten (`_passes`), differentiated (`_differentiate`),
lowered (`_lower`), and run step by step (`_steps`): by C, generated and not (`_emit_c`, `_native`), by Triton
(`_emit_triton`, `_triton`), or by PyTorch (`_eager`). Element-wise functions are records of one table
(`_elementwise`).
"""

from penstock.relational._graph import RelationalGraph as RelationalGraph
from penstock.relational._hgt import HGTConv as HGTConv
from penstock.relational._language import concat as concat
from penstock.relational._language import dot as dot
from penstock.relational._language import dropout as dropout
from penstock.relational._language import elu as elu
from penstock.relational._language import exp as exp
from penstock.relational._language import gelu as gelu
from penstock.relational._language import leaky_relu as leaky_relu
from penstock.relational._language import log as log
from penstock.relational._language import maximum as maximum
from penstock.relational._language import relu as relu
from penstock.relational._language import sigmoid as sigmoid
from penstock.relational._language import softmax as softmax
from penstock.relational._language import sqrt as sqrt
from penstock.relational._language import tanh as tanh
from penstock.relational._more_layers import CompGCNConv as CompGCNConv
from penstock.relational._more_layers import RGraphSAGEConv as RGraphSAGEConv
from penstock.relational._more_layers import SimpleHGNConv as SimpleHGNConv
from penstock.relational._read import Triples as Triples
from penstock.relational._read import read_id_file as read_id_file
from penstock.relational._read import read_ntriples as read_ntriples
from penstock.relational._rgat import RGATConv as RGATConv
from penstock.relational._rgcn import RGCNConv as RGCNConv
from penstock.relational._run import Layer as Layer
from penstock.relational._run import Options as Options
from penstock.relational._run import layer as layer
