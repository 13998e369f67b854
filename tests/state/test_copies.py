"""Copies of pages: what becomes of a page that is dropped while it leaves."""

import pytest
import torch

from penstock.errors import InternalError
from penstock.state._copies import Copies
from penstock.state._page import CHANGES, PageKind, PageState
from penstock.state._register import Register
from penstock.tiers import HandleState


class Handle:
    """A handle whose copy out ends when a test says so."""

    def __init__(self, storage):
        self.state, self.device_storage, self.is_released = HandleState.LEAVING, storage, False

    def release(self):
        self.is_released = True


class Waterfall:
    """A waterfall that keeps storages until `reap` after their copies."""

    def __init__(self):
        self.handles, self.ended, self.num_reaped, self.handed_over = [], set(), 0, []
        self.is_quiet = False

    def park(self, storage, label, *, outdated, spare):
        assert outdated is None
        assert not spare()
        self.handles.append(Handle(storage))
        return self.handles[-1]

    def hand_over(self, storage):
        self.handed_over.append(storage)

    def reap(self):
        self.num_reaped += 1
        for handle in self.ended:
            handle.device_storage = None


@pytest.fixture
def scene():
    """A page with its tensor on the device, and what copies it."""
    register, waterfall = Register(), Waterfall()
    copies = Copies(waterfall, register)
    tensor = torch.zeros(64)
    page = register.add(tensor.untyped_storage(), PageKind.OTHER, "a", 0)
    copies.begun(page)
    return copies, waterfall, page, tensor


def test_the_memory_of_a_page_that_died_while_it_left_is_asked_for_until_it_is_free(scene):
    copies, waterfall, page, _ = scene
    copies.leave(page)
    copies.free_dead()
    assert waterfall.num_reaped == 0
    (handle,) = waterfall.handles
    copies.drop(page)
    assert handle.is_released
    copies.free_dead()
    assert waterfall.num_reaped == 1
    waterfall.ended.add(handle)
    copies.free_dead()
    assert handle.device_storage is None
    copies.free_dead()
    assert waterfall.num_reaped == 2


def test_a_page_that_is_dropped_at_rest_holds_nothing(scene):
    copies, waterfall, page, _ = scene
    copies.drop(page)
    copies.free_dead()
    assert waterfall.num_reaped == 0


def test_a_page_changes_its_state_as_the_table_says(scene):
    copies, waterfall, page, _ = scene
    assert copies.held_bytes == page.size_bytes
    copies.leave(page)
    assert page.state is PageState.LEAVING
    assert copies.leaving_bytes == page.size_bytes
    copies.stay(page)
    assert page.state is PageState.HERE
    assert copies.leaving_bytes == 0
    copies.drop(page)
    assert len(waterfall.handed_over) == 1
    assert page.state is PageState.DROPPED
    assert copies.held_bytes == 0
    for state in PageState:
        with pytest.raises(InternalError, match="a is dropped and cannot become"):
            page.become(state)


@pytest.mark.parametrize("before", PageState)
@pytest.mark.parametrize("after", PageState)
def test_only_changes_of_the_table_are_possible(scene, before, after):
    _, _, page, _ = scene
    page.state = before
    if after in CHANGES[before]:
        page.become(after)
        assert page.state is after
        assert page.is_here == (after in (PageState.HERE, PageState.LEAVING))
    else:
        with pytest.raises(InternalError):
            page.become(after)
        assert page.state is before
