"""What leaves and what is fetched ahead of time, with copies that end when a test says so."""

import pytest

from penstock.state import _space
from penstock.state._course import Course
from penstock.state._pace import Pace
from penstock.state._page import PageKind, PageState
from penstock.state._register import Register
from penstock.state._space import PageSpace

SIZE = 2**20


class Page:
    """A page without a storage."""

    narrow = wide = host_work = None
    is_dead = False
    stays_until = last_use = 0

    def __init__(self, key, is_here):
        self.key, self.is_here, self.size_bytes, self.kind = key, is_here, SIZE, PageKind.PARAMETER
        self.state = PageState.HERE if is_here else PageState.AWAY

    def held_bytes(self):
        return 0 if self.state is PageState.AWAY else self.size_bytes


class Copies:
    """Copies that take until `end`."""

    def __init__(self, pages):
        self.held_bytes = sum(page.held_bytes() for page in pages)
        self.out, self.fetched = [], []

    @property
    def leaving_bytes(self):
        return sum(page.size_bytes for page in self.out)

    def leave(self, page):
        self.out.append(page)
        page.state = PageState.LEAVING

    def settle_finished(self):
        pass

    def end(self):
        """Let the oldest copy out end."""
        page = self.out.pop(0)
        page.is_here, page.state = False, PageState.AWAY
        self.held_bytes -= page.size_bytes

    def prefetch(self, page):
        page.state = PageState.COMING
        self.held_bytes += page.size_bytes
        self.fetched.append(page)
        return True


@pytest.fixture
def scene():
    """Twelve pages, used one after the other, on a device with room for six; step after step."""
    register, pages = Register(), [Page(key, is_here=key < 6) for key in range(12)]
    register.with_key = pages.__getitem__
    register.everything = lambda: pages
    copies = Copies(pages)
    course = Course(6 * SIZE + 2**16, register, copies)
    for _ in range(2):
        course.begin()
        for page in pages:
            course.follow([page], (), is_noted=True)
        course.end([0] * 12, is_whole=True)
    course.begin()
    return pages, copies, course, PageSpace(register, copies, course, Pace(None))


def test_pages_leave_for_more_than_the_one_that_is_fetched_next(scene, monkeypatch):
    pages, copies, course, space = scene
    course.budget_bytes *= 8  # for how far it looks; the limit stays
    monkeypatch.setattr(_space, "_AHEAD_BYTES", 3 * SIZE)
    for position in range(4):
        course.follow([pages[position]], (), is_noted=True)
        course.rank_used([pages[position]], position)
        space.look_ahead([pages[position]], position, 6 * SIZE)
    assert copies.out == pages[:3]
    assert copies.fetched == []
    copies.end()
    space.look_ahead([pages[3]], 3, 6 * SIZE)
    assert copies.fetched == [pages[6]]
    assert copies.out[:2] == pages[1:3]  # others leave while the first comes
    assert copies.held_bytes == 6 * SIZE


def test_nothing_leaves_for_a_page_that_is_used_after_it(scene):
    pages, copies, course, space = scene
    course.follow([pages[0]], (), is_noted=True)
    course.rank_used([pages[0]], 0)
    space.look_ahead([pages[0]], 0, 6 * SIZE)
    assert copies.out in ([], [pages[0]])
