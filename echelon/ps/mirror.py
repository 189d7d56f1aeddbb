"""The leader's end of a copy: what changes in a shard goes to the partner's server, and a partner that came back is filled again.

What travels is the summed gradient, not the parameters: the partner applies it with the same kernels, to the same bits. Workers are
answered once the partner has it. A partner that is gone, or does not answer for ACK_S, is done without: the coordinator is told first,
so that it is never asked to take over with less than workers were told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.clock import Deadline
from echelon.errors import EchelonError, PeerLost
from echelon.native import spread
from echelon.ps.copies import Copies, Copy
from echelon.ps.link import Link
from echelon.ps.pending import Pending
from echelon.ps.recipes import Recipe
from echelon.ps.shard import Gradient, Shard

ACK_S = 10.0
FIRST_S = 60.0
LOOK_S = 0.2

Groups = Sequence[tuple[Recipe, float, Sequence[int]]]


class Site(Protocol):
    """What a server's process knows of the others."""

    def connect(self, rank: int) -> Link | None:
        """A connection to that server; None if it cannot be reached now."""

    def judge(self) -> Link:
        """See judge.Court."""

    def copied(self, shard: int, epoch: int, copied: bool) -> bool:
        """Tells the coordinator whether the partner has a whole copy; False if this server does not lead any more."""


class Mirror:
    """Of one shard that this server leads. record() and its like are called with the model's lock held."""

    def __init__(self, copies: Copies, shard: int, partner: int, site: Site, *, there: bool) -> None:
        self.copies, self.shard, self.partner, self.site = copies, shard, partner, site
        self.epoch = copies.leading[shard]
        self.link: Link | None = None
        self.whole = False
        """The partner has everything: nothing is answered before it acknowledged."""
        self.closed = threading.Event()
        self._filled: set[int] = set()
        self._new = there
        """The partner starts with this server: the first model that is opened waits for it. Later a thread looks for it."""
        self._last: Pending | None = None
        self._rooms: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lock, self._noting, self._sending = threading.Lock(), threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        if not there:
            self._refill_later()

    # -- changes ---------------------------------------------------------------------------------------------------

    def begin(self, model: int, copy: Copy) -> None:
        """The first fill of a model; blocks until the partner has it, or is given up: then it is filled with all others that are held."""
        with self._lock:
            if self._new:
                self._new = False
                self.link = self._connect(Deadline.after(FIRST_S), wait=True)
                if self.link is None:
                    self._refill_later()
            if self.link is None:
                return
            gone, filled = None, None
            try:
                filled = self._fill(self.link, model, copy)
            except EchelonError as error:  # the partner was killed a moment ago
                gone = error
        if gone is not None:
            self._do_without(gone)
            return
        self.wait([filled])
        if self.link is not None and not self.whole:
            self._whole_now()

    def update(
        self,
        model: int,
        copy: Copy,
        done: dict[int, int],
        following: int,
        optimizer: int,
        groups: Groups,
        gradient: Gradient,
        into: Sequence[Tensor] = (),
        since: int | None = None,
    ) -> None:
        """One update of the shard, here and there; `into` and `since` as in Shard.step."""
        shard, link = copy.shard, self.link if model in self._filled else None
        if link is None:
            shard.step(optimizer, groups, gradient, into, since)
            copy.done.update(done)
            return
        keys: dict[torch.dtype, list[int]] = {}
        for _, _, wanted in groups:
            for key in wanted:
                keys.setdefault(shard.values[key].dtype, []).append(key)
        try:
            rooms = {dtype: self._room(link, model, shard, dtype) for dtype in keys}
        except EchelonError as error:  # the partner was killed a moment ago
            self._do_without(error)
            shard.step(optimizer, groups, gradient, into, since)
            copy.done.update(done)
            return
        sums: dict[int, Tensor] = {}
        flats = []
        for dtype, wanted in keys.items():
            flat = rooms[dtype][: sum(shard.values[key].numel() for key in wanted)]
            at = 0
            for key in wanted:
                place = flat[at : at + shard.values[key].numel()]
                found = gradient(key, place)
                spread.add([place], [found] if isinstance(found, Tensor) else found)
                sums[key] = place
                at += place.numel()
            flats.append(flat)
        head = {
            "optimizer": optimizer, "groups": [[r.to_plain(), factor, list(k)] for r, factor, k in groups],
            "keys": list(keys.values()), "updates": shard.updates + 1, "done": list(done.items()), "next": following,
            "turns": self.whole,
        }  # fmt: skip
        if since is not None:
            head["since"] = since
        sent = self._send("update", model, head, flats)
        shard.step(optimizer, groups, lambda key, _: sums[key], into, since)
        copy.done.update(done)
        self.wait([sent])

    def tell(self, verb: str, model: int, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Another change, which was made here already."""
        if self.link is not None and model in self._filled:
            self.wait([self._send(verb, model, head, [x if self.link.local else x.clone() for x in tensors])])

    def note(self, record: dict[str, Any]) -> None:
        """What this server decided beside the models' updates: the newest replaces what was noted before. Returns when the partner has
        it, as tell() does."""
        with self._noting:
            _, before = self.copies.notes[self.shard][0] if self.shard in self.copies.notes else (0, 0)
            number = before + 1
            self.copies.note(self.shard, (self.epoch, number), record)
            self.wait([self._send("note", 0, {"number": number, "record": record}, ())])

    def wait(self, sent: Sequence[Pending | None]) -> None:
        """Until the partner has it; while it is being filled, nobody waits for it. Raises PeerLost if this server does not lead any
        more."""
        for pending in sent:
            if pending is None or (not self.whole and "fill" not in pending.verb):
                continue
            try:
                pending.wait(Deadline.after(ACK_S if self.whole else FIRST_S))
            except EchelonError as error:
                self._do_without(error)
                return

    def close(self) -> None:
        self.closed.set()
        if self.link is not None:
            self.link.close()
        if self._thread is not None:
            self._thread.join(5)

    # -- the partner -----------------------------------------------------------------------------------------------

    def _send(self, verb: str, model: int, head: dict[str, Any], tensors: Sequence[Tensor]) -> Pending | None:
        about = {"shard": self.shard, "epoch": self.epoch, "model": model, **head}
        link = self.link
        if link is None:
            return None
        try:
            with self._sending:  # so that the last is the last
                self._last = sent = link.call(f"copy.{verb}", about, list(tensors))
            return sent
        except EchelonError as error:
            self._do_without(error)
            return None

    def _room(self, link: Link, model: int, shard: Shard, dtype: torch.dtype) -> Tensor:
        """Memory for sums, of two that take turns: see copies.Copying. While nobody waits for the partner, memory of its own."""
        numel = shard.memory.numel() // dtype.itemsize
        if not self.whole:
            return torch.empty(numel, dtype=dtype)
        rooms = self._rooms.setdefault((model, dtype), [])
        if not rooms:
            rooms += [link.buffer(max(64, numel * dtype.itemsize)) for _ in range(2)]
        rooms.reverse()
        return rooms[0][: numel * dtype.itemsize].view(dtype)

    def _do_without(self, error: EchelonError) -> None:
        """The partner is gone, as far as this server can see."""
        with self._lock:
            link, self.link = self.link, None
            if link is None:
                return
            self.whole = False
            self._filled.clear()
            self._rooms.clear()
        link.close()
        if self.closed.is_set():
            return
        if not self.site.copied(self.shard, self.epoch, False):
            self.copies.leading.pop(self.shard, None)
            raise PeerLost(f"another server leads shard {self.shard} now")
        self._refill_later()

    def _refill_later(self) -> None:
        self._thread = threading.Thread(target=self._refill, name=f"ps-refill-{self.shard}", daemon=True)
        self._thread.start()

    def _refill(self) -> None:
        """Waits for the partner to be started again, and fills it, model by model, while training goes on."""
        while not self.closed.wait(LOOK_S):
            try:
                link = self._connect(Deadline.after(FIRST_S), wait=False)
                if link is None:
                    continue
                sent = []
                with self._lock:
                    self._last = None  # what went over the lost link has its answer: that it is lost
                    self.link = link
                for model, copy in self.copies.of_shard(self.shard).items():
                    with copy.lock:
                        sent.append(self._fill(link, model, copy))
                if self.shard in self.copies.notes:  # what is noted from now on goes over this link by itself
                    (_, number), record = self.copies.notes[self.shard]
                    about = {"shard": self.shard, "epoch": self.epoch}
                    sent.append(link.call("copy.note", {**about, "number": number, "record": record}))
                for pending in sent:
                    pending.wait(Deadline.after(FIRST_S))
            except EchelonError:
                with self._lock:
                    self.link = None
                    self._filled.clear()
                continue
            self._thread = None
            self._whole_now()
            return

    def _whole_now(self) -> None:
        """From now on workers wait for the partner. What they were told before that, it has."""
        with self._noting, contextlib.ExitStack() as all_models:
            for copy in self.copies.of_shard(self.shard).values():
                all_models.enter_context(copy.lock)
            try:
                if self._last is not None:
                    self._last.wait(Deadline.after(ACK_S))
            except EchelonError as error:
                self._do_without(error)
            self.whole = self.link is not None
        if self.whole:
            self.site.copied(self.shard, self.epoch, True)

    def _connect(self, deadline: Deadline, *, wait: bool) -> Link | None:
        while True:
            link = self.site.connect(self.partner)
            if link is not None or not wait or deadline.passed or self.closed.wait(LOOK_S):
                return link

    def _fill(self, link: Link, model: int, copy: Copy) -> Pending:
        """Called with the model's lock held."""
        told, payload = copy.shard.snapshot()
        held = [[worker, part, list(mine)] for (worker, _), (part, mine) in copy.held.items()]
        payload = [*payload, *(x for _, mine in copy.held.values() for x in mine.values())]
        head = {
            "shard": self.shard, "epoch": self.epoch, "model": model, **told, "next": copy.updates.next,
            "done": list(copy.done.items()), "held": held, "not_made": list(copy.not_made.items()),
        }  # fmt: skip
        sent = link.call("copy.fill", head, payload if link.local else [x.clone() for x in payload])
        self._filled.add(model)
        return sent
