"""A worker that was killed is started again and takes its seat in the running run: what the others do for it, and what it does.

Everybody, in a term that follows from the coordinator's roster:

1. seated: all seats are taken again; until then the others wait at their lost step
2. groups: the groups of the new term; in the first one all tell where they are, and who needs the state
3. servers: all enter the term there; what was not committed is void, an iteration that was lost after some of its optimizers had
   stepped is undone
4. handed: the lowest rank that has the state gives it to those who need it
5. on the way: a newcomer runs the script from its top to the others' place; until then its groups only pretend. The others go on to
   the next batch, and wait in its first operation

A death in between ends what is under way with a loss, and all of it begins again in the next term.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from echelon import activity
from echelon.checkpoint.handed import Handed
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Work, merge
from echelon.elastic import again, policy
from echelon.errors import EchelonError, LinkLost, LoopError, PeerLost, WorldError
from echelon.events import WorkersBack
from echelon.faults import ON_PURPOSE
from echelon.keeping import Keeping
from echelon.parallel.gradsync import applying
from echelon.prepare.firststep import FirstStep
from echelon.prepare.loader import Loop
from echelon.prepare.trail import Mark

SEATED_S = 60.0
"""How long the others wait for whoever was killed to sit there again; its script may take longer to come to their place."""

NEWS_S = 10.0
"""How long after a loss the coordinator may take to hear whose it was."""

READY_S = 1800.0
"""How long they wait for each other then. Who stands still is named long before (elastic/stuck.py)."""

POLL_S = 0.05
CALL_S = 10.0
MOVE_S = 300.0
"""An exchange in a group of the new term; a death ends it at once."""

TAG = 1
T = TypeVar("T")


class Stands(NamedTuple):
    """Where a rank is, as it tells the others."""

    needs: bool
    """It was started again, and needs the state."""
    step: int
    words: int
    """A number for its place in the script."""
    since: int
    """The step after which its iteration began."""
    lost: bool
    """That iteration is lost: what servers stepped in it did not happen."""

    @property
    def void(self) -> int | None:
        return self.since if self.lost else None


class Rejoin:
    """One a run and worker."""

    def __init__(self, keeping: Keeping, first_step: FirstStep) -> None:
        self.keeping, self.first_step = keeping, first_step
        self.world, self.machine, self.trail = keeping.world, keeping.machine, keeping.trail
        self.member, self.strategy = keeping.member, keeping.strategy
        self.known = (0,) * self.world.size
        """Whom this worker acts with: incarnations by rank."""
        self.tried = 0
        self._stepped = self.known
        """Whom it made its last step with; () when it has made none."""
        self._since = 0
        """The step after which the others' iteration began, when this worker came back."""
        self._lost_at = 0.0
        self.machine.after_loss = self._after_loss
        self.machine.regroup = self._regroup_in_step
        self.machine.before_replay = self._go_on
        self.machine.after_apply.append(lambda optimizer: self._tell())
        keeping.arrived = self._arrived

    # -- may it be? ----------------------------------------------------------------------------------------------

    def _after_loss(self, lost: Lost, step: int) -> bool:
        """A step was lost: raises, or says whether somebody is to be waited for."""
        why_not = self.why_not(lost) if lost.reason != ON_PURPOSE else ""
        return isinstance(self._judge(lost, why_not, step), policy.Regroup)

    def _judge(self, lost: Lost, why_not: str, step: int, what: str = "") -> policy.Replay | policy.Regroup:
        seats = self._seats() if self.member is not None and lost.peers else {}
        found = policy.after_loss(lost.peers, lost.reason, seats, self.world.rank, step, why_not, what)
        if isinstance(found, policy.Stop):
            raise found.error
        return found

    def why_not(self, lost: Lost, at_call: bool = False) -> str:
        """Why the run cannot go on with a successor of whoever was lost; "" when it can. Asks the coordinator."""
        why = again.why_not(asdict(self.strategy), self.world.size - 1)
        if why or self.member is None or not self.world.groups.changing:
            return why or "these groups cannot be made anew"
        if not at_call and self._loop() is None:
            return "no loop over a prepared loader leads back to the place where the step began"
        return "" if self._is_gone() else "no worker is gone"

    def _loop(self) -> Loop | None:
        """The loop whose last batch begins the lost step."""
        loop = self.machine.kept_at
        whole = loop is self.machine.current and isinstance(loop, Loop) and loop.open
        return loop if whole and isinstance(loop, Loop) else None

    def _is_gone(self) -> bool:
        """Does the coordinator know by now that somebody else sits, or sat, in one of the seats?"""
        deadline = Deadline.after(NEWS_S)
        while not deadline.passed:
            seats = self._seats()
            found = tuple(
                int(seats[r]["incarnation"]) for r in sorted(seats) if seats[r]["state"] == "joined"
            )
            if seats and found != self.known:
                return True
            threading.Event().wait(POLL_S)
        return False

    def _seats(self) -> again.Seats:
        """The roster; empty while the coordinator is being started again."""
        assert self.member is not None
        with contextlib.suppress(WorldError):
            return self.member.roster()
        return {}

    # -- the others ----------------------------------------------------------------------------------------------

    def _regroup_in_step(self) -> None:
        """A step was lost, and everything is as it was at the last commit."""
        loop = self._loop()
        assert loop is not None
        self._meet(loop.mark)
        self.world.pretend(True)  # what the script still does in this iteration counts for nothing

    def call(self, live: Callable[[], T], mark: Mark | None = None) -> T:
        """`live()`, in which all workers take part outside of a step. If one is lost in it, its successor comes to this very call (at
        `mark`, or the last one that was made), and all make it again."""
        mark = mark or self.trail.path[-1].body[-1]
        while True:
            value = live()
            lost = self._lost_outside()
            if lost is None:
                return value
            self._judge(lost, self.why_not(lost, at_call=True), self.machine.counters.global_step, "a call")
            mark.done = False
            self._meet(mark)

    def once(self, live: Callable[[], T]) -> T:
        """`live()`, in which all workers take part with what they have: that is gone with whoever is lost in it."""
        value = live()
        lost = self._lost_outside()
        if lost is not None:
            why_not = "what a killed worker had for this call is gone with it (run.log needs nobody else)"
            self._judge(lost, why_not, self.machine.counters.global_step, "a call")
        return value

    def _lost_outside(self) -> Lost | None:
        """What was lost since the last step, if no step will tell it: nothing is under way that could run again. What this rank was given
        meanwhile is its own part alone, and must not be taken for that of all."""
        machine = self.machine
        if machine.iteration_lost or not machine.clean or not machine.side_losses:
            return None
        outcome, machine.side_losses = merge(machine.side_losses), []
        return outcome if isinstance(outcome, Lost) else None

    def _meet(self, mark: Mark) -> None:
        self._lost_at = self._lost_at or time.monotonic()
        self._together(mark)
        self.keeping.renew()
        self._even()

    def _go_on(self) -> None:
        """The lost iteration is over, and its batches come again."""
        self.world.pretend(False)
        self.keeping.asked, self.keeping.prepared.saves = [], 0

    def _tell(self) -> None:
        """After every step: the first of a new term is told by the lowest rank that was there before."""
        if self._stepped == self.known:
            return
        pairs = list(zip(self._stepped, self.known, strict=False))
        back = [rank for rank, (before, now) in enumerate(pairs) if before != now]
        if next((rank for rank in range(len(pairs)) if rank not in back), None) == self.world.rank:
            pause_s, step = time.monotonic() - self._lost_at, self.machine.counters.global_step
            self.keeping.emit(WorkersBack(rank=self.world.rank, ranks=back, step=step, pause_s=pause_s))
        self._stepped, self._lost_at = self.known, 0.0

    # -- the newcomer --------------------------------------------------------------------------------------------

    def come_back(self) -> Handed:
        """This worker was started again: gets the run's state. Its script has to find its way from the top."""
        self.known = self._stepped = ()
        handed = self._together(None)
        assert handed is not None
        self.world.pretend(True)
        return handed

    def _arrived(self) -> None:
        """The script is where the others are, and everything is as they have it."""
        self.world.pretend(False)
        for sync in self.machine.syncs:
            sync.renew()
            there = applying(sync)
            if there is not None:
                there.rejoin(brings=False)
        self.machine.step_before = self._since
        self._even()
        activity.coming.__exit__()

    # -- everybody -----------------------------------------------------------------------------------------------

    def _even(self) -> None:
        """What all workers count or do once begins anew for all."""
        self.machine.begins = self.keeping.prepared.saves = 0
        self.machine.at_first_begin.clear()
        self.machine.side_losses.clear()
        self.first_step.skip()

    def _together(self, mark: Mark | None) -> Handed | None:
        """All workers in a new term; what was handed over, to one that has no `mark` of its own."""
        while True:
            meet = self._seated()
            self.tried = meet.term
            try:
                handed = self._enter(meet, mark)
            except (PeerLost, LinkLost, WorldError, RuntimeError):
                if not self._is_over(meet.term):
                    raise
                continue
            self.known = meet.incarnations
            return handed

    def _seated(self) -> again.Meet:
        deadline = Deadline.after(SEATED_S)
        while True:
            found = again.standing(self._seats(), self.world.size, self.known, self.tried)
            if isinstance(found, again.Meet):
                return found
            if isinstance(found, again.Never):
                raise PeerLost(found.reason, peers=found.peers)
            if deadline.passed:
                raise PeerLost(f"{found.reason}, but it did not come within {SEATED_S:g} s")
            activity.moved()
            with activity.inside(activity.COMING):
                threading.Event().wait(POLL_S)

    def _is_over(self, term: int) -> bool:
        """Did somebody die while this term was being entered?"""
        deadline = Deadline.after(NEWS_S)
        while not deadline.passed:
            seats = self._seats().values()
            if any(seat["state"] != "joined" or int(seat["term"]) > term for seat in seats):
                return True
            threading.Event().wait(POLL_S)
        return False

    def _ready(self, meet: again.Meet) -> None:
        """Blocks until all workers know of this term: some may be in a long forward, or importing."""
        assert self.member is not None
        deadline, size = Deadline.after(READY_S), self.world.size
        keys = [f"again/{meet.term}/{rank}" for rank in range(size)]
        self.member.call("store.set", Deadline.after(CALL_S), key=keys[self.world.rank], value=b"1")
        with activity.waiting("start", activity.ANYBODY, "the workers to come together again"):
            while not self.member.call("store.check", Deadline.after(CALL_S), keys=keys):
                self._still(meet)
                if deadline.passed:
                    raise PeerLost(f"the workers did not come together within {READY_S:g} s")
                threading.Event().wait(POLL_S)

    def _still(self, meet: again.Meet) -> None:
        """Raises PeerLost once the workers are not those of this term any more."""
        seats = self._seats()
        found = again.standing(seats, self.world.size, ())
        if isinstance(found, again.Never):
            raise PeerLost(found.reason, peers=found.peers)
        if seats and found != meet:
            raise PeerLost("another worker was killed meanwhile")

    def _enter(self, meet: again.Meet, mark: Mark | None) -> Handed | None:
        groups, rank, term = self.world.groups, self.world.rank, meet.term
        # groups
        self._ready(meet)
        groups.renew(term)
        group = groups.changing[0].inner
        places = self._places(group, mark)
        needy = [r for r, place in enumerate(places) if place.needs]
        giver = next((r for r in range(len(places)) if r not in needy), None)
        if giver is None:
            raise PeerLost("no worker is left that knows how far the run was", peers=tuple(needy))
        if len({(place.step, place.words) for place in places if not place.needs}) > 1:
            raise _apart(places, needy)
        # servers
        self._since, void = places[giver].since, places[giver].void
        if self.world.servers is not None:
            self.world.servers.enter(term, lambda: self._still(meet), void)
        for sync in self.machine.syncs if mark is not None else ():
            there = applying(sync)
            if there is not None and void is not None:
                there.undone(void)
        # handed
        handed = None
        if rank == giver and mark is not None:
            whole = self.keeping.handed(mark)
            for peer in needy:
                _over(group.send(torch.tensor([len(whole)]), peer, TAG))
                _over(group.send(whole, peer, TAG))
        elif rank in needy:
            handed = _received(group, giver)
        for sync in self.machine.syncs if mark is not None else ():
            sync.renew()
            there = applying(sync)
            if there is not None:
                there.rejoin(brings=rank == giver)
        if mark is not None:
            groups.renew_torch()
        return handed

    def _places(self, group: Group, mark: Mark | None) -> list[Stands]:
        """Of each rank."""
        machine = self.machine
        words = "" if mark is None else f"{mark.kind} {machine.iteration_lost}"
        mine = torch.tensor(
            [float(mark is None), machine.counters.global_step, zlib.crc32(words.encode()), machine.step_before,
             float(machine.iteration_lost)],
            dtype=torch.float64,
        )  # fmt: skip
        every = torch.zeros(group.size, len(mine), dtype=torch.float64)
        _over(group.all_gather(every, mine))
        return [
            Stands(bool(needs), int(step), int(place), int(since), bool(lost))
            for needs, step, place, since, lost in every.tolist()
        ]


def _received(group: Group, giver: int) -> Handed:
    length = torch.zeros(1, dtype=torch.int64)
    _over(group.recv(length, giver, TAG))
    whole: Tensor = torch.empty(int(length), dtype=torch.uint8)
    _over(group.recv(whole, giver, TAG))
    return Handed(whole)


def _over(work: Work) -> None:
    outcome = work.wait(Deadline.after(MOVE_S))
    if isinstance(outcome, Lost):
        raise PeerLost(f"another worker was lost: {outcome.reason}", peers=outcome.peers)


def _apart(places: list[Stands], needy: list[int]) -> EchelonError:
    steps = ", ".join(
        f"worker {r} after step {place.step}" for r, place in enumerate(places) if r not in needy
    )
    return LoopError(
        f"the workers that are left stand at different places of the script: {steps}",
        remedy="Go on from the last checkpoint: echelon run --resume.",
    )
