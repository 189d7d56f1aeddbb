"""Bounded staleness as a GradSync (ps, update=bounded): a worker goes on while the last updates are still being made.

Update s is the sum of all workers' parts of global batch s, applied by the servers in order. A worker computes step s on
parameters of update s - staleness or later: after its step it waits only for the answer of the update that the next step needs,
and takes the newest that is there. Gradients stay here until step(), then part and step travel in one call. With staleness=0
that is sync, bit for bit.

Nobody meets but on the servers: what was asked to stop travels with the parts, comes back with the answer of update u, and
counts after step u + staleness, which nobody can have passed before hearing of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from echelon.comm.group import Group, Met, Outcome
from echelon.errors import LinkLost, PeerLost, UsageError
from echelon.parallel.buckets import Bucket
from echelon.parallel.elsewhere import OnServers
from echelon.parallel.gradsync import Groups
from echelon.parallel.pushpull import PushSync
from echelon.ps.held import Call
from echelon.ps.worker import Servers, lost
from echelon.verdict import Make, Refuse, Rule, Skip, Suspect, from_plain, verdict


@dataclass(frozen=True)
class Note:
    """What servers said of an update that they did not make: `behind` updates before the newest of this worker."""

    found: Skip | Refuse
    behind: int
    mine: bool
    """This worker tells of it."""


class StaleSync(PushSync):
    """See GradSync. `clip_norm` is the strategy's: it is applied where the sum is."""

    undoes = alone = False
    """Every worker's part is an update by itself."""

    nonfinite: Rule = "pass"
    """The strategy's: servers judge, since nobody else knows the gradient of an update."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, bool]],
        group: Group,
        servers: Servers,
        model: int,
        staleness: int,
        clip_norm: float = 0.0,
        **sizes: int,
    ) -> None:
        self.staleness, self.clip_norm = staleness, clip_norm
        self.notes: list[Note] = []
        super().__init__(params, group, servers, model, **sizes)
        self.rooms = [self.held.rooms() for _ in range(staleness + 1)]
        self.flying: deque[tuple[int, list[Call]]] = deque()
        """Updates asked for and not answered, the oldest first."""
        self.version = 0
        """The newest update that the parameters here have seen."""
        self.stop_at: int | None = None
        self.optimizer: int | None = None

    # -- a backward: nothing leaves --------------------------------------------------------------------------------

    def _leave(self) -> None:
        pass

    def _reclaim(self, bucket: Bucket) -> None:
        pass

    def finish(self) -> None:
        if not self.open and (self.met_in_micro or not self.share.last):
            return
        self.open = True
        self._thaw()
        self._collect()
        for slot in self.slots:
            slot.param.grad = OnServers.of(slot.name, slot.param) if slot.index in self.filled else None
        self._met(Met(), 0.0)
        self._reset()

    def squares(self, params: Iterable[Tensor]) -> tuple[float, bool]:
        raise UsageError(
            f"with update={'async' if self.alone else 'bounded'} nobody knows the norm of a gradient before its update, nor whether it "
            "is finite: other workers may be steps behind",
            remedy="Use clip_norm=… of the strategy, which the server applies; scalers and run.clip_grad_norm go with update=sync.",
        )

    # -- the step --------------------------------------------------------------------------------------------------

    def apply(self, optimizer: int, groups: Groups, since: int | None = None) -> Outcome:
        self._only(optimizer)
        self._upload_changes()
        began = time.perf_counter()
        try:
            number = self._send(optimizer, groups)
            self._catch_up(self.staleness)
            if self.stop_at is not None and number >= self.stop_at:
                self._catch_up(0)
                self.stop_seen = True
        except (LinkLost, PeerLost) as error:
            return lost(error)
        finally:
            self.wait_s += time.perf_counter() - began
        self._note_versions()
        return Met()

    def _only(self, optimizer: int) -> None:
        if self.optimizer not in (None, optimizer):
            raise UsageError(
                "with update=bounded and async, and with backup, a model has one optimizer: updates are counted by it",
                remedy="Put the parameter groups into one optimizer, or use update=sync.",
            )
        self.optimizer = optimizer

    def _send(self, optimizer: int, groups: Groups) -> int:
        room = self.rooms[(self.held.steps + 1) % len(self.rooms)]
        number, calls = self._part(optimizer, groups, "train.step", room)
        self.flying.append((number, calls))
        return number

    def _part(
        self, optimizer: int, groups: Groups, verb: str, room: Sequence[Tensor] | None
    ) -> tuple[int, list[Call]]:
        """This worker's part goes to the servers: its number, and the calls."""
        named = [(recipe, [s.name for s in self._mine(params) if s.bucket]) for recipe, params in groups]
        stepping = {s.index for _, params in groups for s in self._mine(params)}
        parts = []
        for bucket in self.buckets:
            if bucket.tail is None:
                for slot in bucket.slots:
                    if slot.index not in self.filled and slot.view is not None:
                        slot.view.zero_()
                flat = bucket.flat if bucket.flat.device.type == "cpu" else bucket.flat.cpu()
                parts.append((flat, self.runs[bucket.index]))
        used = [s.name for s in self.slots if s.index in self.filled and s.index in stepping]
        return self.held.step(
            optimizer, named, parts, used, room, verb, version=self.version, stop=self.stop_wanted(), alone=self.alone,
            clip_norm=self.clip_norm, **({"nonfinite": self.nonfinite} if self.nonfinite != "pass" else {}), **self._about(),
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        """What else a server must know of this part."""
        return {}

    def _catch_up(self, behind: int) -> None:
        """Waits until at most `behind` updates are under way, and takes the newest values that are here."""
        newest = None
        while self.flying and (len(self.flying) > behind or all(call.done for call in self.flying[0][1])):
            number, calls = self.flying.popleft()
            replies = self.held.servers.wait(calls, f"update {number} of the servers")
            if self._note(replies[0].head, self.held.steps - number, self.alone or self.group.rank == 0):
                self.flying.clear()  # what comes after it is not made either
                return
            newest, self.version = number, min(int(reply.head["updates"]) for reply in replies)
            if self.stop_at is None and any(reply.head["stop"] for reply in replies):
                self.stop_at = number + self.staleness
        if newest is not None:
            self.held.take(self.rooms[newest % len(self.rooms)])

    def _note(self, told: dict[str, Any], behind: int, mine: bool) -> bool:
        """An update that was not made, if that is what the servers say; all say the same. True if it ends the run."""
        if "not_finite" not in told:
            return False
        suspects = [Suspect(*self.held.named(pair)) for pair in from_plain(told["whose"])]
        rule: Rule = "refuse" if told["not_finite"] == "refuse" else "skip"
        found = verdict(rule, False, suspects)
        assert not isinstance(found, Make)
        self.notes.append(Note(found, behind, mine))
        return isinstance(found, Refuse)

    def drain(self) -> None:
        """Blocks until the parameters have seen every update that was asked for."""
        if self.flying:
            self._catch_up(0)
            self._note_versions()

    def state(self, optimizer: int, params: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        self.drain()
        return super().state(optimizer, params)

    def load(self, optimizer: int, groups: Groups, state: Any) -> None:
        self.drain()
        super().load(optimizer, groups, state)


class FreeSync(StaleSync):
    """ps, update=async: one push is one update, and nobody waits for anybody. Workers take whole batches of the script's loader by
    themselves, so their steps are not each other's; the server counts how far behind a gradient was.

    A worker that had nothing in an iteration makes no update. drain() pulls what the servers have now, also on a worker that never
    stepped because the others were faster. Before anybody's first update it leaves the parameters as the script made them.
    """

    alone = True
    pieces: Callable[[], list[list[int]]] = staticmethod(list)
    """What the part that is about to leave was computed from: servers count each piece once."""

    leads: Callable[[], bool] = staticmethod(lambda: True)
    """Is this the worker that speaks for all? Another one does when the one that did is gone."""

    compensation = 0.0
    divided = False
    """What is done about late gradients: the strategy's `compensation` and `stale_lr`."""

    def _about(self) -> dict[str, Any]:
        return {"pieces": self.pieces(), "compensation": self.compensation, "divided": self.divided}

    def _brings(self) -> bool:
        return self.leads()

    def apply(self, optimizer: int, groups: Groups, since: int | None = None) -> Outcome:
        if not self.filled:
            return Met()
        return super().apply(optimizer, groups)

    def drain(self) -> None:
        self.held.pull(updated=not self.version)
        self._note_versions()

    def fresh(self) -> None:
        self.drain()
