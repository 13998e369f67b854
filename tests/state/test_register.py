"""Which storages are pages, and which key a page of the next step gets."""

import torch

from penstock.state._page import PageKind
from penstock.state._register import Register
from penstock.storages import storage_id


def add(register, tensor, kind=PageKind.OTHER, name="a", place=0):
    return register.add(tensor.untyped_storage(), kind, name, place)


def test_a_page_is_found_by_storage_and_by_key_until_it_is_removed():
    register, tensor = Register(), torch.zeros(8)
    page = add(register, tensor)
    assert register.find(storage_id(tensor)) is register.with_key(page.key) is page
    assert list(register) == register.everything() == [page]
    register.remove(page)
    assert register.find(storage_id(tensor)) is register.with_key(page.key) is None
    assert register.label(page.key) == "a"
    assert register.num_changes == 2


def test_a_key_is_free_again_once_its_page_is_dead():
    register, first = Register(), torch.zeros(8)
    key = add(register, first).key
    second = torch.zeros(8)
    assert add(register, second).key != key
    del first
    third = torch.zeros(8)
    assert add(register, third).key == key


def test_dead_pages_are_kept_for_those_who_must_drop_them():
    register, tensor = Register(), torch.zeros(8)
    page, identity = add(register, tensor), storage_id(tensor)
    del tensor
    assert list(register) == []
    assert register.everything() == [page]
    assert identity not in {storage_id(new) for new in [torch.zeros(8) for _ in range(1000)]}


def test_what_is_left_alone_stays_so_as_long_as_it_lives():
    register, tensor = Register(), torch.zeros(8)
    page = add(register, tensor)
    assert not register.is_left_alone(tensor.untyped_storage())
    register.leave_alone(page)
    register.remove(page)
    assert register.is_left_alone(tensor.untyped_storage())
