"""Large tensors in memory that is kept for the next one, and little more of it than was in use at once (csrc/blocks.h).

The C library keeps freed blocks of some MiB without being able to use them for the next ones, and gives larger ones back at once, so that
each costs its page faults anew: a worker grows by up to a third more than it needs, or waits for the kernel. So torch's own calls for
memory are led to the core, those of its library alone (csrc/reroute.h). Where that cannot be, all is as before.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from echelon import native

LIBRARY = "libc10."
"""What gets and frees the memory of torch's CPU tensors."""


class Sizes(NamedTuple):
    """Bytes of blocks: of tensors now, of tensors at the most lately, with pages, and taken without pages since the start."""

    used: int = 0
    most_used: int = 0
    resident: int = 0
    fresh: int = 0


_core: ModuleType | None = None


def use() -> bool:
    """From now on tensors of 512 KiB and more are blocks of ours; those that are there stay where they are. False where that cannot be."""
    global _core
    core = native.core()
    if core is not None and core.block_memory_of(LIBRARY):
        _core = core
    return _core is not None


def sizes() -> Sizes:
    """All 0 while they are not in use."""
    return Sizes(*_core.blocks()) if _core is not None else Sizes()


def tighten() -> None:
    """From now on the free memory that is kept and the used together are never more than was in use at the most."""
    if _core is not None:
        _core.tighten_blocks()


def settle() -> None:
    """What was in use until now says nothing of what comes: free memory goes back to the system."""
    if _core is not None:
        _core.settle_blocks()


def age() -> None:
    """Now and then: what was not needed for a minute or two goes back to the system, also while no tensor comes or goes."""
    if _core is not None:
        _core.age_blocks()
