"""update=local as a GradSync: every worker trains its own copy on whole batches of its own, and copies meet on the servers.

`.grad` is the worker's own and whole, as in one process: any loop, optimizer, scaler or clipping works. A meeting comes

1. after `local_steps` steps of this worker, when the last of them is final
2. at a gathering, where a script needs all workers at one place (Rounds.gather)

All models meet at once: workers that are at a gathering serve the others' meetings, and could not know of which model's.
Optimizer state stays the worker's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.alone import AloneGroup
from echelon.comm.group import Outcome
from echelon.errors import LinkLost, PeerLost, StrategyError
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.buckets import Slot
from echelon.parallel.gradsync import Share
from echelon.ps import meetings
from echelon.ps.meetings import Place
from echelon.ps.owned import Owned
from echelon.ps.pending import Answered, Reply
from echelon.ps.recipes import Recipe
from echelon.ps.worker import Servers, lost
from echelon.verdict import Rule, Suspect, Verdict, verdict


@dataclass(frozen=True)
class Around:
    """What meetings ask of the run around them."""

    before_change: Callable[[], None]
    """Called before parameters change: a checkpoint may still be reading them."""
    following: Callable[[], bool]
    """The script is on its way back to where a run was left: nothing is as it was then yet."""
    in_loop: Callable[[], bool]
    """A loader says where steps begin and end."""
    trained: Callable[[], set[int]]
    """Ids of what optimizers step."""
    nonfinite: Rule = "pass"
    """The strategy's."""
    heed: Callable[[Verdict], None] = lambda found: None
    """Told what was decided about a copy that is not finite; raises where that ends the run."""


class LocalSync(AllReduceSync):
    """See GradSync. Counts the samples that went into steps since the last meeting: what this copy weighs there."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, bool]],
        device: torch.device,
        rounds: Rounds,
        **sizes: int,
    ) -> None:
        strange = [(name, p.dtype) for name, p, _ in params if p.dtype not in (torch.float32, torch.float64)]
        if strange:
            raise StrategyError(
                f"`{strange[0][0]}` is {str(strange[0][1]).removeprefix('torch.')}: servers know float32 and float64",
                remedy="Keep the weights in float32 and compute in other types with autocast, or use update=sync.",
            )
        self._looked = False
        """Nothing was frozen or thawed since growing() was asked."""
        super().__init__(params, AloneGroup(device), **sizes)  # type: ignore[arg-type]
        self.rounds = rounds
        self.moments: Callable[[], Mapping[str, Tensor]] = dict
        """What is averaged beside the parameters, by name."""
        self.samples = 0
        """In steps that are final."""
        self._group: int | None = None
        """In this group so far; None if nothing of it had a backward."""
        self._fresh = self._began = 0
        """In the step that was taken last; the activity when its last micro-step began."""
        self.copies: Owned | None = None
        self.momentum: Mapping[str, Tensor] | None = None
        """The outer optimizer's, of a checkpoint."""
        rounds.syncs.append(self)

    def build(self, ordered: list[Slot]) -> None:
        super().build(ordered)
        self._looked = False

    def growing(self) -> bool:
        """The servers do not hold all that is trained: at first, and after layers were thawed."""
        if self._looked:
            return False
        self._looked = True
        return self.copies is None or any(name not in self.copies.params for name, _ in self._trained())

    def _trained(self) -> list[tuple[str, Tensor]]:
        """What requires a gradient or has an optimizer: what is frozen for good need not travel."""
        stepped = self.rounds.around.trained()
        slots = [s for s in reversed(self.slots) if s.param.requires_grad or id(s.param) in stepped]
        return [(s.name, s.param) for s in slots]

    def hold(self) -> None:
        """The servers hold it from now on, as worker 0 has it. Every worker calls it."""
        rounds, before = self.rounds, self.copies
        if before is not None and rounds.rank == 0:
            self.momentum = before.momentum()
        number = rounds.servers.new_model()
        self.copies = Owned(rounds.servers, number, self._trained(), self.moments, rounds.rank, rounds.recipe)
        self.copies.open(self.momentum)

    # -- what it weighs --------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        self.rounds.open()
        self._count()
        super().begin(share)
        self._began = self.activity

    def _count(self) -> None:
        """Samples of a micro-step that had a backward; one that was only looked at weighs nothing."""
        if self.activity > self._began:
            self._group = (self._group or 0) + self.share.count
            self._began = self.activity

    def commit(self, step: int) -> Outcome:
        self.rounds.open()  # a loop without a loader begins nothing
        self._count()
        if step:  # on the way back there are none
            self._fresh += (
                1 if self._group is None else self._group
            )  # gradients of the script's own making count
            self.rounds.stepped(step)
        self._group = None
        return super().commit(step)

    def forget(self) -> None:
        self._group, self._fresh, self._began = None, 0, self.activity
        super().forget()

    def settled(self) -> None:
        super().settled()
        self.samples, self._fresh = self.samples + self._fresh, 0
        self.rounds.settled(self)

    def weighed(self) -> int:
        """What this copy weighs in a meeting of now; counted from 0 again after that."""
        count = self.samples + self._fresh
        self.samples = self._fresh = 0
        return count

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        kept = self.copies.momentum() if self.copies is not None and self.rounds.rank == 0 else {}
        return {**super().layout(), "outer_momentum": kept}

    def lay(self, layout: dict[str, Any]) -> None:
        super().lay(layout)
        self.momentum = layout.get("outer_momentum") or None


class Rounds:
    """This worker's meetings. One a run. After a peer or a server is lost, the next step says so."""

    def __init__(
        self, servers: Servers, rank: int, local_steps: int, geo: bool, recipe: Recipe | None, around: Around
    ) -> None:
        self.servers, self.rank, self.local_steps = servers, rank, local_steps
        self.geo, self.recipe, self.around = geo, recipe, around
        self.syncs: list[LocalSync] = []
        self.steps = self.number = self.reached = 0
        """Steps since the last meeting; meetings; gatherings that this worker came to or passed by."""
        self.ended = False
        """All were at one place to stop: there are no meetings any more."""
        self._last_step = 0

    def open(self) -> None:
        """Before a step on what servers do not hold yet: the values are what the script, or a checkpoint, made of them. Copies that are
        held already meet first."""
        if self.ended or self.around.following():
            return
        growing = [sync for sync in self.syncs if sync.growing()]
        if any(sync.copies is not None for sync in growing):
            self._meet(over=False)
        for sync in growing:
            sync.hold()

    def stepped(self, step: int) -> None:
        """Several optimizers, and a step that is taken again, make one step."""
        if step != self._last_step:
            self._last_step = step
            self.steps += 1

    def settled(self, sync: LocalSync) -> None:
        """The step is final; with the last model's, that of all of them. In a loop without a loader it ends elsewhere: step_over()."""
        if sync is self.syncs[-1] and self.around.in_loop():
            self.step_over()

    def step_over(self) -> None:
        """Nothing of the last step is under way: the copies may meet."""
        if self.steps >= self.local_steps and not self.ended:
            try:
                self._meet(over=False)
            except (LinkLost, PeerLost) as error:
                self.syncs[0].outcomes.append(
                    lost(error)
                )  # the next step is lost, and the policy says what follows

    def pass_by(self) -> None:
        """A gathering that is not waited at: the script left a loop in its middle, or an error did."""
        self.reached += 1

    def gather(self) -> None:
        """Blocks until every worker is at this place of the script; then all copies are the same. Raises when one is lost."""
        if self.ended or not self.syncs:
            return
        self.open()
        self.reached += 1
        while True:
            told = self._meet(over=True)
            if told.ended:
                self.ended = True
                return
            if told.passed >= self.reached:
                return

    def _meet(self, over: bool) -> meetings.Verdict:
        self.around.before_change()
        self.steps = 0
        began = time.perf_counter()
        try:
            told = self._meet_one_by_one(over) if self.geo else self._meet_all(over)
        finally:
            self.syncs[0].wait_s += time.perf_counter() - began
        if told.stop:
            for sync in self.syncs:
                sync.stop_seen = True
        return told

    def _place(self, over: bool) -> Place:
        return Place(self.reached, over, any(sync.stop_wanted() or sync.stop_seen for sync in self.syncs))

    def _meet_all(self, over: bool) -> meetings.Verdict:
        self.number += 1
        self.servers.number(0)
        place, unfit = self._place(over), self._unfit()
        calls = [
            copies.meet(self.number, sync.weighed() * (copies not in unfit), place)
            for sync, copies in self._copies()
        ]
        replies = self._answered(calls, "a meeting of all workers")
        for (_, copies), mine in zip(self._copies(), replies, strict=True):
            if mine[0].head["moved"] or copies in unfit:
                copies.taken()
        return _verdict(replies)

    def _meet_one_by_one(self, over: bool) -> meetings.Verdict:
        """geo: what this worker did goes to the servers at once; at a gathering it then waits for the others."""
        before = Place(self.reached - over, False, False)
        for copies in self._unfit():
            copies.taken()
        went = [copies for sync, copies in self._copies() if sync.weighed() or (over and copies.edited())]
        self._answered([copies.add(before) for copies in went], "an update of the servers")
        for copies in went:
            copies.taken()
        if not over:
            return meetings.Verdict(0, False, False, "nobody is waited for")
        self.servers.number(0)
        place = self._place(over)
        replies = self._answered([copies.await_all(place) for _, copies in self._copies()], "all workers")
        for _, copies in self._copies():
            copies.taken()
        return _verdict(replies)

    def _unfit(self) -> list[Owned]:
        """Copies that are not finite: they bring nothing to a meeting, and become what the others agree on or what was agreed on last."""
        found = []
        for _, copies in self._copies() if self.around.nonfinite != "pass" else ():
            wrong = copies.mend()
            if wrong:
                suspects = [Suspect(self.rank, name) for name in wrong]
                self.around.heed(verdict(self.around.nonfinite, False, suspects, "copy"))
                found.append(copies)
        return found

    def _copies(self) -> list[tuple[LocalSync, Owned]]:
        return [(sync, sync.copies) for sync in self.syncs if sync.copies is not None]

    def _answered(self, calls: Sequence[Sequence[Answered]], what: str) -> list[list[Reply]]:
        return [self.servers.wait(mine, what) for mine in calls]


def _verdict(replies: Sequence[Sequence[Reply]]) -> meetings.Verdict:
    heads = [reply.head for mine in replies for reply in mine]
    return meetings.Verdict(
        min(int(head["passed"]) for head in heads),
        all(bool(head["ended"]) for head in heads),
        any(bool(head["stop"]) for head in heads),
        "",
    )


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics of normalising layers, by name: what each worker's own batches make of them."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for name in ("running_mean", "running_var"):
                value = getattr(module, name)
                if value is not None and value.dtype in (torch.float32, torch.float64):
                    found[f"{prefix}.{name} (averaged)"] = value
    return found
