"""A group that is given another one when the workers of a run change: who holds it goes on holding it.

Of a new term the inner group is made when it is first asked for, so that ranks which are on their way need not come to it in
any order. Before that, and whenever nothing counts, it `pretends`: see echo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon import activity
from echelon.comm.echo import EchoGroup
from echelon.comm.group import Group, Lost, Op, Receipt, Work
from echelon.errors import EchelonError


class ChangingGroup:
    """See Group. `make` gives the inner group of the present term; what it raises is a loss."""

    def __init__(
        self, name: str, rank: int, size: int, device: torch.device, make: Callable[[str], Group]
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.local = False
        self._pretends = False
        self._ready: Group | None = None
        """What operations go to, if nothing has to be asked first: this is on the path of every one."""
        self._make = make
        self._inner: Group | None = None
        self._echo = EchoGroup(rank, size, device)
        self._old: Group | None = None
        self._sent_before = 0.0

    @property
    def inner(self) -> Group:
        """The group of the present term. Blocks, the first time in a term, until all ranks are in it; raises what kept them."""
        if self._inner is None:
            self._set(self._make(self.name))
            assert self._inner is not None
        return self._inner

    @property
    def pretends(self) -> bool:
        """Operations are over at once, and mean nothing."""
        return self._pretends

    @pretends.setter
    def pretends(self, so: bool) -> None:
        self._pretends = so
        self._set(self._inner)

    @property
    def sent_bytes(self) -> float:
        """See Group: in all terms together."""
        inner = self._inner
        return self._sent_before + (inner.sent_bytes if inner is not None else 0.0)

    def _set(self, inner: Group | None) -> None:
        self._inner = inner
        self._ready = self._echo if self._pretends else inner

    def change(self) -> None:
        """A new term has begun: what is under way is lost, and the next operation is one of the new term."""
        old = self._inner
        self._set(None)
        activity.begun.pop(self.name, None)
        if old is not None:
            self._sent_before += old.sent_bytes
            old.abort("the workers of this run changed")
            old.close()
            self._old = old  # the core may still write where its last operations were to

    def _now(self) -> Group:
        """The group of the present term, made if need be; what kept it from being made is a loss."""
        try:
            return self.inner
        except EchelonError as error:
            lost = Lost(error.peers, error.message)
            self._set(EchoGroup(self.rank, self.size, self._echo.device, lost))
            return self.inner

    def buffer(self, nbytes: int) -> Tensor:
        return (self._ready or self._echo).buffer(nbytes)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return (self._ready or self._now()).all_reduce(x, op)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        return (self._ready or self._now()).reduce_scatter(out, x, op)

    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum") -> Work:
        return (self._ready or self._now()).reduce(x, root, op)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return (self._ready or self._now()).all_gather(out, x)

    def gather(self, out: Tensor | None, x: Tensor, root: int = 0) -> Work:
        return (self._ready or self._now()).gather(out, x, root)

    def scatter(self, out: Tensor, x: Tensor | None, root: int = 0) -> Work:
        return (self._ready or self._now()).scatter(out, x, root)

    def all_to_all(self, out: Tensor, x: Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> Work:
        return (self._ready or self._now()).all_to_all(out, x, out_counts, counts)

    def broadcast(self, x: Tensor, root: int = 0) -> Work:
        return (self._ready or self._now()).broadcast(x, root)

    def send(self, x: Tensor, peer: int, tag: int = 0) -> Work:
        return (self._ready or self._now()).send(x, peer, tag)

    def recv(self, x: Tensor, peer: int | None, tag: int = 0) -> Receipt:
        return (self._ready or self._now()).recv(x, peer, tag)

    def barrier(self) -> Work:
        return (self._ready or self._now()).barrier()

    def abort(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.abort(reason)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
