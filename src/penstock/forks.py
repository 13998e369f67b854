"""Renewal of objects in forked children.

A child has only the thread that forked. A lock that another thread held stays locked there for ever, and the disk space
of the parent's files stays taken as long as the child has them open. So a module whose objects have such state says
once, at import, how each is renewed.
"""

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

Renewed = TypeVar("Renewed")


def renewed_in_child(renew: Callable[[Renewed], object]) -> "weakref.WeakSet[Renewed]":
    """Return a weak set; every forked child calls ``renew`` with each object in it.

    Sets are renewed in the order in which they were made. They stay registered for good, so call this at import.
    """
    members: weakref.WeakSet[Renewed] = weakref.WeakSet()

    def renew_all() -> None:
        for member in list(members):
            renew(member)

    os.register_at_fork(after_in_child=renew_all)
    return members
