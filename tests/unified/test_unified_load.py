"""Tables of files become unified tensors; shared ones are pickled as the path."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from unified_cases import numbers, table

from penstock import tiers, unified
from penstock.errors import BudgetError


@pytest.mark.parametrize("kind", ["npy", "safetensors", "raw", "rows"])
def test_tables_of_files(tmp_path, kind):
    expected, path = numbers((20, 6)), tmp_path / f"x.{kind}"
    options = {}
    if kind == "npy":
        np.save(path, expected.numpy())
    elif kind == "safetensors":
        save_file({"x": expected, "other": numbers((3,))}, path)
        options = {"key": "x"}
    elif kind == "raw":
        path.write_bytes(b"1234" + expected.numpy().tobytes())
        options = {"dtype": torch.float32, "shape": (20, 6), "offset": 4}
    else:
        unified.write_features(path, expected)
    budget = tiers.Budget(host="1KiB")
    table = unified.from_file(path, **options, budget=budget)
    assert torch.equal(table.cpu(), expected)
    assert budget.held_bytes("host") == 480
    with pytest.raises(BudgetError):
        unified.from_file(path, **options, budget=tiers.Budget(host=100))
    if kind == "rows":
        with pytest.raises(ValueError, match="padded rows"):
            unified.from_file(path, shared=True)
        return
    shared = unified.from_file(path, **options, shared=True)
    assert torch.equal(shared.cpu(), expected)
    shared[3] = 5
    assert torch.equal(pickle.loads(pickle.dumps(shared))[3].cpu(), torch.full((6,), 5.0))
    assert torch.equal(unified.from_file(path, **options)[3].cpu(), torch.full((6,), 5.0))


def test_pickling_is_refused_or_by_reference(tmp_path):
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(unified.wrap(table()))
    np.save(tmp_path / "x.npy", table().numpy())
    shared = unified.from_file(tmp_path / "x.npy", shared=True, prefer="host")
    again = pickle.loads(pickle.dumps(shared))
    assert torch.equal(again.cpu(), table()) and again.prefer == "host"
    assert len(pickle.dumps(shared)) < 1000
    again[0] = 77
    assert (shared[0] == 77).all()  # one memory
    for view in (shared[1:], shared.view(-1), shared.view(torch.int32), shared.t()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(view)
    parameter = pickle.loads(pickle.dumps(torch.nn.Parameter(shared)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def _write(features, row, value):
    features[row] = value


def test_several_processes_share_one_table(tmp_path):
    np.save(tmp_path / "x.npy", table().numpy())
    shared = unified.from_file(tmp_path / "x.npy", shared=True)
    context = multiprocessing.get_context("forkserver")
    workers = [context.Process(target=_write, args=(shared, row, 100.0 + row)) for row in (3, 7)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (shared[3] == 103).all() and (shared[7] == 107).all()
