"""Atoms of a model that cannot be traced."""

import torch
from whole_jobs import Branching, batches, loss

from penstock.fleet._tree import Tree


def test_atoms_follow_first_uses_and_hold_every_tensor_once():
    model = Branching()
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    leaves = list(batches()[0])
    from penstock.fleet._batch import flatten

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, structure = flatten(batches()[0])
    tree = Tree(model, loss, leaves, structure, names)
    order = [name for atom in tree.atoms for name in atom.tensors]
    assert sorted(order) == sorted(names.values())
    assert order.index("embed.weight") < order.index("position") < order.index("norm.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
