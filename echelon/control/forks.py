"""What a forked child must not keep: sockets, lifelines, locks held by threads that are not in the child.

A DataLoader worker is a fork of its rank. If it kept the rank's sockets, the death of the rank would not end its
connections, and peers would wait. So everything that owns a descriptor registers here.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that owns descriptors or threads of this process."""

    def after_fork(self) -> None:
        """Called once in a forked child, before anything else runs there: close descriptors quietly (no shutdown:
        the parent still uses the connection), replace locks, refuse further use. Must not block or raise."""


_owners: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(owner: Forkable) -> None:
    """From now on `owner.after_fork()` runs in every forked child. Holds no reference."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in list(_owners):
        owner.after_fork()
    _owners.clear()


os.register_at_fork(after_in_child=_in_child)
