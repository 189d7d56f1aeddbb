"""Memory of the parameter server's wire: bytes of tensors, shared segments on both sides, receive buffers that are used again."""

from __future__ import annotations

import copy
import ctypes
import fcntl
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import WireError, WorldError
from echelon.ps.frame import DTYPES, MIB, Limits, aligned

TORCH = tuple(getattr(torch, name) for name, _ in DTYPES)
CODES = {dtype: code for code, dtype in enumerate(TORCH)}

SEGMENT_BYTES = 4 * MIB
"""The first segment; each further one is at least as large as all before it together, up to LARGEST_BYTES."""

LARGEST_BYTES = 64 * MIB
LENT_BYTES = 1024 * MIB
"""So much is lent at a time: who keeps more answers than that gets ordinary memory for them."""

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
POOLED_BYTES = 512 * MIB
MAX_VIEWS = 8192

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def raw(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Whoever holds it must hold the tensor as well."""
    size = x.nbytes
    return memoryview(_view(x.data_ptr(), size, _WRITABLE)) if size else memoryview(bytearray())


def tensor_of(buffer: Any, dtype: int, shape: list[int], offset: int) -> Tensor:
    """A tensor over a writable buffer, which it keeps alive."""
    kind, count = TORCH[dtype], 1
    for dim in shape:
        count *= dim
    if not count:
        return torch.empty(shape, dtype=kind)
    found = torch.frombuffer(buffer, dtype=kind, count=count, offset=offset)
    return found if len(shape) == 1 else found.view(shape)


class Segment:
    """One memfd, mapped; it needs no descriptor from then on. The mapping goes with the last tensor that views it, never before."""

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number, self.size = number, size
        self.bytes = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
        self.begin = self.bytes.data_ptr()
        _madvise(
            self.begin, size, _POPULATE
        )  # an older kernel does not know it: then pages come as they are touched

    def numbered(self, number: int) -> Segment:
        """The same memory under another number."""
        other = copy.copy(self)
        other.number = number
        return other

    def view(self, offset: int, num_bytes: int, dtype: int, shape: list[int]) -> Tensor:
        if not num_bytes:
            return torch.empty(shape, dtype=TORCH[dtype])
        return self.bytes[offset : offset + num_bytes].view(TORCH[dtype]).view(shape)


class Arena:
    """The client's side: segments made as they are needed, and buffers in them. Thread-safe.

    `announce(fd, size)` hands a new segment to the server before anything can refer to it; the descriptor is its to close.
    """

    def __init__(self, announce: Callable[[int, int], None], limits: Limits) -> None:
        self._announce, self._limits = announce, limits
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._begins: list[tuple[int, int]] = []
        self._free: list[tuple[int, int, int]] = []  # (segment, offset, bytes), in order, no two touching
        self._taken: dict[int, tuple[int, int, int]] = {}
        self._others: list[Arena] = []
        self._lent_bytes = 0
        self._returned: deque[tuple[int, int]] = (
            deque()
        )  # (pointer, bytes) of what was lent and nobody views any more

    @property
    def num_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def share_with(self, others: Sequence[Arena]) -> None:
        """Segments that are made from now on are handed to these arenas' servers as well, and found there. Not the other way round."""
        self._others += [other for other in others if other not in (self, *self._others)]

    def take(self, num_bytes: int) -> Tensor:
        """uint8, at a multiple of 64 bytes. WorldError when there is no memory."""
        size = aligned(num_bytes)
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            self._tidy()
            at = next((i for i, hole in enumerate(self._free) if hole[2] >= size), None)
            if at is None:
                self._grow(size)
                at = next(i for i, hole in enumerate(self._free) if hole[2] >= size)
            number, offset, held = self._free.pop(at)
            if held > size:
                insort(self._free, (number, offset + size, held - size))
            segment = self._segments[number]
            self._taken[segment.begin + offset] = (number, offset, size)
            return segment.bytes[offset : offset + num_bytes]

    def lend(self, num_bytes: int) -> Tensor | None:
        """take() of memory that comes back by itself, with the last tensor or array that views it. None when there is none, or when
        more than LENT_BYTES would be out."""
        with self._lock:
            self._tidy()
            if not num_bytes or self._lent_bytes + num_bytes > LENT_BYTES:
                return None
            try:
                held = self.take(num_bytes).numpy()
            except WorldError:
                return None
            self._lent_bytes += num_bytes
        # runs wherever the last view ends, also in the middle of take(): it only leaves a note
        weakref.finalize(held, self._returned.append, (held.ctypes.data, num_bytes)).atexit = False
        return torch.from_numpy(held)

    def give(self, buffer: Tensor) -> bool:
        """Takes a buffer back; False for one that is not from here."""
        return self._give(buffer.data_ptr()) or not buffer.numel()

    def _tidy(self) -> None:
        while self._returned:
            pointer, num_bytes = self._returned.popleft()
            self._lent_bytes -= num_bytes
            self._give(pointer)

    def _give(self, pointer: int) -> bool:
        with self._lock:
            hole = self._taken.pop(pointer, None)
            if hole is None:
                return False
            number, begin, size = hole
            at = bisect_right(self._free, hole)
            if at < len(self._free) and self._free[at][:2] == (number, begin + size):
                size += self._free.pop(at)[2]
            if at and self._free[at - 1][0] == number and sum(self._free[at - 1][1:]) == begin:
                begin, size = self._free[at - 1][1], size + self._free[at - 1][2]
                self._free.pop(at - 1)
            insort(self._free, (number, begin, size))
            return True

    def find(self, pointer: int, num_bytes: int) -> tuple[int, int] | None:
        """(segment, offset) of memory that lies in a segment."""
        begins, segments = self._begins, self._segments
        at = bisect_right(begins, (pointer, 1 << 60)) - 1
        if at < 0:
            return None
        begin, number = begins[at]
        return (number, pointer - begin) if pointer + num_bytes <= begin + segments[number].size else None

    def close(self) -> None:
        """Forgets its segments; each goes with the last tensor that views it."""
        with self._lock:
            self._begins, self._free, self._taken = [], [], {}
            self._segments = []

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def _grow(self, size: int) -> None:
        size = max(size, min(LARGEST_BYTES, max(SEGMENT_BYTES, self.num_bytes)))
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        if len(self._segments) >= self._limits.segments:
            raise WorldError(
                f"this connection has {len(self._segments)} pieces of shared memory, and the server takes no more",
                remedy="Ask for fewer and larger buffers, or release() those that are not needed.",
            )
        fd = os.memfd_create("echelon-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment = Segment(len(self._segments), fd, size)
        except (OSError, RuntimeError) as error:
            os.close(fd)
            raise WorldError(
                f"there is no {size >> 20} MiB to share with a parameter server: {error}",
                remedy="Free memory, or raise the limits of this container or shell (ulimit -a).",
            ) from None
        for other in self._others:
            other._adopt(os.dup(fd), segment)
        self._announce(fd, size)
        self._segments.append(segment)
        insort(self._begins, (segment.begin, segment.number))
        insort(self._free, (segment.number, 0, size))

    def _adopt(self, fd: int, segment: Segment) -> None:
        """Another arena's: nothing is taken from it here. One too many is left out, and what lies there is copied."""
        with self._lock:
            if len(self._segments) >= self._limits.segments:
                os.close(fd)
                return
            self._announce(fd, segment.size)
            self._segments.append(segment.numbered(len(self._segments)))
            insort(self._begins, (segment.begin, self._segments[-1].number))


class Mapped:
    """The server's side: what a client shared. Only its connection's thread adds; any may look."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._segments: list[Segment] = []
        self._views: dict[tuple[int, ...], Tensor] = {}

    def add(self, fd: int, size: int) -> None:
        """Takes over the descriptor. WireError for a segment that could be made shorter, or that is not as large as told: reading
        behind its end would end this process."""
        try:
            if len(self._segments) >= self._limits.segments:
                raise WireError("too many pieces of shared memory")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise WireError("shared memory must be a memfd") from None
            about = os.fstat(fd)
            if not seals & fcntl.F_SEAL_SHRINK or about.st_size != size or size <= 0:
                raise WireError("shared memory must be sealed against shrinking and as large as told")
            if about.st_blocks * 512 < size:
                raise WireError("shared memory must be allocated by who shares it")
            try:
                self._segments.append(Segment(len(self._segments), fd, size))
            except (OSError, RuntimeError) as error:
                raise WireError(f"shared memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)

    def close(self) -> None:
        """Forgets the segments; each goes with the last tensor that views it."""
        self._segments, self._views = [], {}

    def view(self, segment: int, offset: int, num_bytes: int, dtype: int, shape: list[int]) -> Tensor:
        """A tensor in a client's memory; WireError outside of it."""
        key = (segment, offset, dtype, *shape)
        found = self._views.get(key)
        if found is None:
            if not 0 <= segment < len(self._segments) or offset + num_bytes > self._segments[segment].size:
                raise WireError("a tensor outside of the shared memory")
            if offset % TORCH[dtype].itemsize:
                raise WireError("a tensor at an odd place of the shared memory")
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            found = self._views[key] = self._segments[segment].view(offset, num_bytes, dtype, shape)
        return found


class Pool:
    """Receive buffers that are used again: fresh memory costs more in page faults than a copy does. Thread-safe."""

    def __init__(self, keep_bytes: int = POOLED_BYTES) -> None:
        self._keep_bytes, self._held_bytes = keep_bytes, 0
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """uint8, at least as long as asked."""
        size = 1 << max(12, (num_bytes - 1).bit_length())
        with self._lock:
            kept = self._free.get(size)
            if kept:
                self._held_bytes -= size
                return kept.pop()
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Back, once nobody reads or writes it: the very tensor that take() gave."""
        size = buffer.numel()
        with self._lock:
            if self._held_bytes + size <= self._keep_bytes:
                self._held_bytes += size
                self._free.setdefault(size, []).append(buffer)
