"""Faults on purpose, for tests and rehearsals: said once, they happen once.

faults.lose(step=3)                 the commit of step 3 is lost on every rank, as if a peer had died and come back
faults.lose(step=3, optimizer=1)    … the commit of the second prepared optimizer in that step
"""

from __future__ import annotations

ON_PURPOSE = "lost on purpose"

_lost: list[tuple[int, int]] = []


def lose(step: int, optimizer: int = 0) -> None:
    """The commit that would make `run.global_step` reach `step` does not meet: nothing is applied, all is replayed.

    Call it on every rank. Said twice for one step, that step is lost twice.
    """
    _lost.append((step, optimizer))


def due(step: int, optimizer: int) -> bool:
    """Is this optimizer's commit of `step` to be lost now? Asking takes the fault away."""
    if (step, optimizer) in _lost:
        _lost.remove((step, optimizer))
        return True
    return False


def clear() -> None:
    _lost.clear()
