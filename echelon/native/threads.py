"""How many threads the core takes for one long range. What it gives does not depend on it.

Short ranges stay on the thread that calls (csrc/crew.h). Helpers are the core's own: they hold no lock of Python, sleep while there is
nothing to do, and are not there in a forked child until it needs them.
"""

from __future__ import annotations

import torch

_said: list[int] = []


def use(number: int | None) -> None:
    """From now on so many, the caller among them; None: as many as torch, asked anew."""
    _said[:] = [] if number is None else [max(1, number)]


def number() -> int:
    """As use() said, else as many as torch has, which the launcher sets: its count when this was first asked."""
    if not _said:
        _said.append(torch.get_num_threads())
    return _said[0]
