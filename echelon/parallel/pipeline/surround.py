"""What is different while a forward is recorded: parts of torch that would hide a call from the recorder, or ask for numbers.

Replaced only for the thread that records, and put back afterwards; one recording at a time in a process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch.nn.modules import transformer

_one = threading.RLock()


class Listener(Protocol):
    """Who records."""

    def applied(
        self, function: type[torch.autograd.Function], original: Callable[..., Any], args: Any
    ) -> Any:
        """A call of a torch.autograd.Function: does it, and gives its result."""
        ...

    def enter_region(self) -> None:
        """What follows is computed again in backward."""
        ...

    def leave_region(self) -> None: ...


@contextlib.contextmanager
def surrounded(listener: Listener) -> Iterator[None]:
    """1. torch.autograd.Function.apply is a call like another (torch shows it to nobody)
    2. torch.utils.checkpoint marks a region, and computes nothing twice while recording
    3. nn.TransformerEncoder does not look into its mask to see whether it is causal: the mask itself is used
    """
    mine = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == mine

    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        return listener.applied(cls, bound, args) if here() and not kwargs else bound(*args, **kwargs)

    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch.utils.checkpoint.CheckpointFunction
    causal = transformer._detect_is_causal_mask

    def region(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if not here():
            yield from generator(*args, **kwargs)
            return
        listener.enter_region()
        try:
            yield
        finally:
            listener.leave_region()

    class Region:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if not here():
                return reentrant.apply(function, preserve, *args)
            listener.enter_region()
            try:
                return function(*args)
            finally:
                listener.leave_region()

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True if here() else causal(mask, is_causal, size)

    places: list[tuple[Any, str, Any, Any]] = [
        (torch.autograd.Function, "apply", classmethod(apply), original),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", region, generator),
        (torch.utils.checkpoint, "CheckpointFunction", Region, reentrant),
        (transformer, "_detect_is_causal_mask", detect, causal),
    ]
    with _one:
        for owner, name, ours, _ in places:
            setattr(owner, name, ours)
        try:
            yield
        finally:
            for owner, name, _, theirs in places:
                setattr(owner, name, theirs)
