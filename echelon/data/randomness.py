"""Random states of torch, random and numpy: seeded from what they belong to, and put back after use."""

from __future__ import annotations

import ctypes
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: Any) -> int:
    """63 well-mixed bits from a few numbers or strings; the same on every machine and in every process."""
    state = 0x9E3779B97F4A7C15
    for item in parts:
        number = item if isinstance(item, int) else zlib.crc32(repr(item).encode())
        state = ((state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class RandomState:
    """The three generators of the CPU, and those of the CUDA devices that were used."""

    torch: Tensor
    python: Any
    numpy: Any
    cuda: tuple[Tensor, ...] = ()


class _Watched:
    """The state of a generator that is slow to copy, copied only while it is seen to move.

    `peek` reads a few bytes that change with every draw. Until they change, the last copy is still right. After a
    change the state is copied every time, until it stood still for CALM captures (numpy keeps a second gaussian
    that no peek shows, so one quiet capture proves nothing).
    """

    CALM = 1000

    def __init__(self, peek: Callable[[], bytes] | None, full: Callable[[], Any]) -> None:
        self.peek, self.full = peek, full
        self.mark = b""
        self.last: Any = None
        self.restless = 0

    def state(self) -> Any:
        if self.peek is None:
            return self.full()
        mark = self.peek()
        if mark == self.mark:
            if not self.restless:
                return self.last
            self.restless -= 1
        else:
            self.restless = self.CALM if self.mark else 0
        self.mark, self.last = mark, self.full()
        return self.last


def _peek_python() -> Callable[[], bytes] | None:
    """Reads the index and the first words of Python's Mersenne Twister, if they lie where we think."""
    instance = getattr(random, "_inst", None)
    address = id(instance) + object.__basicsize__

    def peek() -> bytes:
        return ctypes.string_at(address, 12)

    words = random.getstate()[1]
    known = struct.pack("iII", words[-1], words[0], words[1])
    return peek if instance is not None and peek() == known else None


def _peek_numpy() -> Callable[[], bytes] | None:
    """Reads the position and the first words of numpy's legacy generator, if they lie where we think."""
    try:
        address = np.random.mtrand._rand._bit_generator.ctypes.state_address  # type: ignore[attr-defined]
    except AttributeError:
        return None

    def peek() -> bytes:
        return ctypes.string_at(address + 624 * 4, 4) + ctypes.string_at(address, 8)

    _, keys, pos, _, _ = np.random.get_state()
    known = struct.pack("iII", pos, int(keys[0]), int(keys[1]))  # type: ignore[arg-type]
    return peek if peek() == known else None


_python = _Watched(_peek_python(), random.getstate)
_numpy = _Watched(_peek_numpy(), np.random.get_state)


def capture(cuda: bool = False) -> RandomState:
    """Where all generators stand now."""
    device = tuple(torch.cuda.get_rng_state_all()) if cuda and torch.cuda.is_initialized() else ()
    return RandomState(torch.get_rng_state(), _python.state(), _numpy.state(), device)


def restore(state: RandomState) -> None:
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    if state.cuda:
        torch.cuda.set_rng_state_all(list(state.cuda))


def packed(state: RandomState) -> dict[str, Any]:
    """A state as plain data: numbers, lists and tensors."""
    version, words, gauss = state.python
    name, keys, pos, has_gauss, cached = state.numpy
    return {
        "torch": state.torch,
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
            pos,
            has_gauss,
            cached,
        ],
        "cuda": list(state.cuda),
    }


def unpacked(record: dict[str, Any]) -> RandomState:
    version, words, gauss = record["python"]
    name, keys, pos, has_gauss, cached = record["numpy"]
    return RandomState(
        record["torch"],
        (version, tuple(words.tolist()), gauss),
        (name, keys.numpy().astype(np.uint32), pos, has_gauss, cached),
        tuple(record["cuda"]),
    )


def without_cuda(state: RandomState) -> RandomState:
    """For a machine that has other devices."""
    return RandomState(state.torch, state.python, state.numpy)


def seed_cpu(number: int) -> None:
    """Seeds the three CPU generators; 20 times cheaper than torch.manual_seed, which goes to every device."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def seed_everything(number: int) -> None:
    """What a script's own `torch.manual_seed; random.seed; np.random.seed` does."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


class Stream:
    """Randomness of its own for a piece of code that draws from the global generators.

    Inside `with stream.entered():` the global generators are this stream's; outside they are what they were.
    """

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        self._state: RandomState | None = None

    @classmethod
    def at(cls, state: Any) -> Stream:
        """A stream that goes on where state() was taken."""
        stream = cls(0)
        stream._state = unpacked(state)
        return stream

    def state(self) -> Any:
        """Where it stands, as plain data; None before its first use."""
        return None if self._state is None else packed(self._state)

    @contextmanager
    def entered(self) -> Iterator[None]:
        outside = capture()
        if self._state is None:
            assert self._number is not None
            seed_cpu(self._number)
        else:
            restore(self._state)
        try:
            yield
        finally:
            self._state = RandomState(torch.get_rng_state(), random.getstate(), np.random.get_state())
            restore(outside)
