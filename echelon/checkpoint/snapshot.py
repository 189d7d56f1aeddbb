"""A rank's share of the state, copied into one buffer of the host: the layout of its file, the copy, the bytes.

The buffer is laid out as the file will be, so that writing is one stream of it and needs no further memory.
"""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint import kinds, tensorfile
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.manifest import BLOCK_BYTES
from echelon.checkpoint.plan import Plan, Slot
from echelon.checkpoint.store import Bytes

WRITE_BYTES = 4 << 20
"""Bytes a write call: few enough calls, and a look at the others between them."""

POPULATE_BYTES = 16 << 20
MADV_POPULATE_WRITE = 23
"""Linux 5.14; python's mmap does not name it yet."""


class HostBuffer:
    """Memory for one snapshot, made once and used again; pinned where a GPU copies into it. Exactly as large as the
    largest snapshot so far."""

    def __init__(self) -> None:
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """`num_bytes` of it. What was taken before is overwritten."""
        if self._bytes.numel() < num_bytes:
            self.close()
            mapped = mmap.mmap(-1, num_bytes)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        if pinned and not self._pinned and num_bytes:
            # torch's own pinned memory comes in powers of two: up to twice what is needed
            done = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
            self._pinned = int(done) == 0
        return self._bytes[:num_bytes]

    def populate(self) -> None:
        """Makes the system give the memory now: a first copy into fresh pages takes seven times as long as the next.
        Changes no content, so it may run beside anything. Where the system cannot, nothing happens."""
        held = self._bytes
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for at in range(0, held.numel(), POPULATE_BYTES):
            length = min(POPULATE_BYTES, held.numel() - at)
            if madvise(held.data_ptr() + at, length, MADV_POPULATE_WRITE) != 0:
                return

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._pinned = torch.empty(0, dtype=torch.uint8), False


class Snapshot:
    """The copy of what `plan` says of `holdings`. First copy_now() in the caller's thread, then copy_rest() in any; then
    chunks(). One plan serves one snapshot at a time: the checksums are in its slots."""

    def __init__(self, plan: Plan, holdings: Sequence[Holding], buffer: HostBuffer) -> None:
        self.slots, self.num_bytes = plan.slots, plan.num_bytes
        self._tensors = {slot.number: holdings[slot.number].tensor for slot in self.slots}
        devices = {tensor.device for tensor in self._tensors.values()}
        self._devices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        self._buffer = buffer.take(self.num_bytes, pinned=bool(self._devices))
        self._ready = {index: _record(index) for index in self._devices}
        self._copied: list[torch.cuda.Event] = []

    def copy_now(self, *, everything: bool) -> bool:
        """Copies what may change soon, or all of it; True when there is a rest."""
        now = [slot for slot in self.slots if everything or not slot.part.holding.settled]
        for slot in now:
            self._copy(slot)
        if now:
            self._copied += [_record(index) for index in self._devices]
        return len(now) < len(self.slots)

    def copy_rest(self) -> None:
        """Copies what is settled, on a stream of its own where it lies on a GPU. May return before the GPU is done."""
        rest = [slot for slot in self.slots if slot.part.holding.settled]
        for index in self._devices:
            stream = torch.cuda.Stream(index)
            stream.wait_event(self._ready[index])
            with torch.cuda.stream(stream):
                for slot in rest:
                    if self._tensors[slot.number].device == torch.device("cuda", index):
                        self._copy(slot)
                self._copied.append(_record(index))
        for slot in rest:
            if self._tensors[slot.number].device.type != "cuda":
                self._copy(slot)

    def hold_stream(self) -> None:
        """Makes the caller's GPU streams wait for the copy; the caller itself goes on."""
        for event in self._copied:
            torch.cuda.current_stream(event.device).wait_event(event)

    def wait(self) -> None:
        """Blocks until the bytes are in the buffer; the tensors are needed no more."""
        for event in self._copied:
            event.synchronize()
        self._tensors = {}

    def header(self) -> bytes:
        rows = []
        for slot in self.slots:
            part, dtype = slot.part, slot.part.holding.tensor.dtype
            shape = tuple(part.shape) if part.whole else (part.run.numel,)
            rows.append(
                (
                    slot.entry,
                    kinds.file_name(dtype, slot.entry),
                    kinds.file_shape(shape, dtype),
                    part.num_bytes,
                )
            )
        return tensorfile.header(rows)

    def chunks(self, look: Callable[[], None]) -> Iterator[Bytes]:
        """The file, header first; fills in the checksums on the way. `look` is called now and then and may raise."""
        yield self.header()
        view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        sent = 0
        for slot in self.slots:
            slot.crc32.clear()
            end = slot.offset + slot.part.num_bytes
            for start in range(slot.offset, end, BLOCK_BYTES):
                crc = 0
                for at in range(start, min(start + BLOCK_BYTES, end), WRITE_BYTES):
                    upto = min(at + WRITE_BYTES, start + BLOCK_BYTES, end)
                    crc = zlib.crc32(view[at:upto], crc)
                    if upto - sent >= WRITE_BYTES:
                        look()
                        yield view[sent:upto]
                        sent = upto
                slot.crc32.append(crc)
        if sent < self.num_bytes:
            yield view[sent : self.num_bytes]

    def _copy(self, slot: Slot) -> None:
        part, tensor = slot.part, self._tensors[slot.number]
        source = kinds.bits(tensor)
        times = 2 if tensor.is_complex() else 1
        start, stop = part.start * times, part.stop * times
        target = self._buffer[slot.offset : slot.offset + part.num_bytes].view(source.dtype)
        for at, view in kinds.windows(source, start, stop):
            into = target[at - start : at - start + view.numel()].view(view.shape)
            if view.device.type == "cpu":  # one thread: torch would take the cores of the step beside it
                np.copyto(into.numpy(), view.numpy())
            else:
                into.copy_(view, non_blocking=view.device.type == "cuda")


def _record(index: int) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))
    return event
