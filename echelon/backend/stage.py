"""From a program's tensors to those that a Group takes, and back: contiguous, on the host.

A tensor that is both already is used as it is. Others are copied, those of a GPU through pinned memory. GPU copies are
synchronised with the stream that is current when an operation begins and when it ends, so a program needs no
more care than with any other backend; nothing overlaps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Stage:
    """The tensors of one operation. `ready()` before it begins, `finish()` or `zero()` when it is over."""

    __slots__ = ("_back", "_devices", "_zeroed", "outputs")

    def __init__(self, outputs: Sequence[Tensor] = (), kept: bool = False) -> None:
        self.outputs = list(outputs)
        """What the program gets back: the result of its Work and of its future."""
        self._zeroed = [] if kept else self.outputs
        """`kept`: they are this rank's own values, which a loss leaves alone."""
        self._back: list[Callable[[], object]] = []
        self._devices: set[torch.device] = set()

    def read(self, x: Tensor) -> Tensor:
        """The values of x; not written."""
        x = x.data.resolve_conj().resolve_neg()
        if x.device.type == "cpu":
            return x.contiguous()
        return self._host(x).copy_(x, non_blocking=True)

    def write(self, x: Tensor) -> Tensor:
        """A tensor whose content x gets in the end."""
        x = x.data
        if _plain(x):
            return x
        host = self._host(x)
        self._back.append(lambda: x.copy_(host, non_blocking=True))
        return host

    def change(self, x: Tensor) -> Tensor:
        """Both: the values of x, and what x becomes."""
        x = x.data
        if _plain(x):
            return x
        host = self.write(x)
        return host.copy_(x, non_blocking=True)

    def read_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor with a leading dim over these, which are of one shape."""
        together = _neighbours(tensors)
        if together is not None:
            return together
        rows = [x.data.resolve_conj().resolve_neg() for x in tensors]
        return self.read(rows[0][None] if len(rows) == 1 else torch.stack(rows))

    def write_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor with a leading dim, whose rows these get in the end."""
        together = _neighbours(tensors)
        if together is not None:
            return together
        rows = torch.empty(
            (len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device=tensors[0].device
        )
        plain = self.write(rows)
        self._back.append(lambda: [x.data.copy_(row) for x, row in zip(tensors, rows, strict=True)])
        return plain

    def read_flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """These tensors, of one type, one after the other in one dim."""
        return self.read(torch.cat([x.data.resolve_conj().resolve_neg().reshape(-1) for x in tensors]))

    def write_flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One dim from which these get their content in the end."""
        flat = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        plain = self.write(flat)
        self._back.append(lambda: _split(flat, tensors))
        return plain

    def change_flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Both, for tensors of one type."""
        if len(tensors) == 1:
            return self.change(tensors[0])
        flat = torch.cat([x.data.reshape(-1) for x in tensors])
        plain = self.change(flat)
        self._back.append(lambda: _split(flat, tensors))
        return plain

    def then(self, act: Callable[[], object]) -> None:
        """Done when the operation met."""
        self._back.append(act)

    def ready(self) -> None:
        """What the program computes on its GPUs has arrived here."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def finish(self) -> None:
        """The operation met: every output gets what it is due."""
        for put in self._back:
            put()
        self.ready()

    def zero(self) -> None:
        """The operation was lost, and the program shall go on: its outputs are zeros."""
        for x in self._zeroed:
            x.data.zero_()
        self.ready()

    def _host(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.empty(x.shape, dtype=x.dtype)
        self._devices.add(x.device)
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.data.copy_(part.view(x.shape))


def _plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """These tensors as rows of one, if that is how they lie in memory."""
    first = tensors[0].data
    storage = first.untyped_storage().data_ptr() if first.device.type == "cpu" else 0
    for i, x in enumerate(tensors):
        if (
            not _plain(x)
            or x.shape != first.shape
            or x.dtype != first.dtype
            or x.untyped_storage().data_ptr() != storage
            or x.storage_offset() != first.storage_offset() + i * first.numel()
        ):
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
