"""What `compile` and the backend return: a module, or a function, that shows its plans."""

import copy
import pickle

import pytest
import torch
from breaking import batch, make
from torch import nn

from penstock import remat
from penstock.errors import BudgetError


def test_shapes_are_listed():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (32, 24, 32):
        step(batch(rows)).backward()
    assert len(step.plans) == 2
    assert step.explain().count("peak ") == 2
    assert "32x32x64" in step.explain()
    assert "24x32x64" in step.explain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(batch(24)).backward()
    assert len(step.plans) == 3
    assert "24x32x64 float32 under autocast to bfloat16" in step.explain()


def test_a_compiled_module_is_the_module_to_whoever_asks():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    assert step.head is model.head
    assert [id(parameter) for parameter in step.parameters()] == [id(parameter) for parameter in model.parameters()]
    assert set(step.state_dict()) == {f"_orig_mod.{name}" for name in model.state_dict()}
    step.eval()
    assert not model.training
    with torch.no_grad():
        assert torch.equal(step(batch()), model(batch()))


def test_a_graph_that_does_not_fit_alone_is_refused_before_it_runs():
    model = make("plain", num_blocks=1)
    with pytest.raises(BudgetError, match="cannot be met: this step needs at least"):
        remat.compile(model, budget="1MiB")(batch())
    with pytest.raises(ValueError, match="'budget' is missing: penstock"):
        remat.compile(model)
    with pytest.raises(ValueError, match="unknown options"):
        remat.compile(model, budget="1MiB", bugdet=3)
    with pytest.raises(ValueError, match="`method` must be 'hybrid', 'recompute' or 'swap', got"):
        remat.compile(model, budget="1MiB", method="recomp")


def test_frozen_parts_stay_as_they_are_and_attributes_are_the_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    step = remat.compile(model, budget="1MiB")
    assert step.training
    assert not model[1].training
    step.temperature = 2.0
    assert model.temperature == 2.0
    assert not step.eval().training
    assert not model.training


def test_copies_and_pickles_are_compiled_again():
    model, x = make("print", num_blocks=1), batch()
    model.lock = None
    step = remat.compile(model, budget="64MiB")
    step(x).backward()
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert not copied.plans
        assert torch.equal(copied(x), model(x))
        assert copied.head.weight is not model.head.weight


def test_lightnings_note_of_what_was_compiled_does_not_keep_it_from_being_pickled(monkeypatch):
    def noting(compiled, **keywords):
        result = torch_compile(compiled, **keywords)
        result._compile_kwargs = dict(keywords)  # as lightning.fabric does to torch.compile
        return result

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", noting)
    model = nn.Linear(4, 1)
    before = dict(vars(model))
    step = remat.compile(model, budget="1MiB")
    assert vars(model) == before
    copied = pickle.loads(pickle.dumps(step))
    assert torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_backend_shows_its_plans():
    backend = remat.Backend(budget="64MiB")
    step = torch.compile(make("plain", num_blocks=1), backend=backend)
    for rows in (2, 3):
        step(batch(rows)).backward()
    assert len(backend.plans) == 2
    assert "2x32x64" in backend.explain()
    assert "3x32x64" in backend.explain()
    assert copy.deepcopy(backend) is backend
    backend.close()
