"""Uses an installed wheel as on a machine without a C compiler: run by `tests/test_release.py` and by cibuildwheel."""

import os
import tempfile
import warnings
from dataclasses import replace

import numpy as np
import torch

from penstock import native, relational, remat, unified
from penstock.errors import PenstockWarning
from penstock.remat import _simulate


def plan():
    slowly, _simulate.simulate_slowly = _simulate.simulate_slowly, None
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model, batch = torch.nn.Sequential(*layers), torch.randn(256, 64)
    step = remat.optimize(lambda rows: model(rows).square().sum(), [batch], None)
    least = remat.smallest_budget_bytes(step.plan.problem)
    budget = (least + step.plan.peak_bytes) // 2
    assert remat.plan(step.plan.problem, budget).peak_bytes <= budget
    problem = replace(step.plan.problem, out_bandwidth_bytes_per_s=1e9, in_bandwidth_bytes_per_s=1e9)
    graph = _simulate.FlatProblem(problem)
    for decision in remat.Decision:  # C has the same numbers for them
        decisions = np.full(len(problem.storages), decision, dtype=np.uint8)
        compiled, expected = _simulate.simulate(graph, decisions), slowly(graph, decisions)
        assert compiled.peak_bytes == expected.peak_bytes
        assert compiled.slots.tolist() == expected.slots.tolist()


def sample_and_read(disk):
    graph = unified.Graph(torch.randint(500, (2, 4000)), 500)
    sample = unified.NeighborSampler(graph, [4, 4]).sample(torch.arange(20))
    table, rows = torch.randn(4000, 600).half(), 8 * sample.nodes
    with unified.TieredFeatures(table, disk=disk, host="3MiB") as features:
        assert torch.equal(features[rows], table[rows])


def relate():
    conv = relational.RGCNConv(8, 8, num_relations=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PenstockWarning)
        for _ in range(2):
            conv(torch.randn(20, 8), torch.randint(20, (2, 60)), torch.randint(3, (60,))).sum().backward()
    (told,) = [str(warning.message) for warning in caught if issubclass(warning.category, PenstockWarning)]
    assert "relational layers" in told and "apt-get install gcc" in told


def main():
    os.environ.update(PATH="", CC="")
    warnings.simplefilter("error", PenstockWarning)
    assert native.find_compiler() is None and native.has_libraries()
    native.tell_what_is_slower(lambda text: print(f"not so: {text}"))
    plan()
    with tempfile.TemporaryDirectory() as disk:
        sample_and_read(disk)
    relate()
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1] for line in file if ".so" in line}
    assert sum("libgomp" in path or "libiomp" in path or "libomp" in path for path in libraries) == 1
    print(" ".join(sorted(path for path in libraries if "/penstock/native/" in path)))


if __name__ == "__main__":
    main()
