"""The one state machine of a training step, in the order in which it happens.

    a loader yields  -> begin:  the last step is over for good; remember what a replay would need; set the share
    forward          -> (norms gather their moments)
    backward         -> gradients meet (parallel/), `.grad` is global
    optimizer.step   -> step:   in mid-group: seal. Else meet, commit, apply — or lose: put back, rewind, go on
    scheduler.step   -> only if its optimizer really stepped

A step is a transaction: applied everywhere or nowhere. The unit of replay is everything since the last commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from echelon import away, closures, faults, judging, replay
from echelon.comm.group import Lost, Met, Outcome, merge
from echelon.data.loader import Part
from echelon.errors import LinkLost, PeerLost
from echelon.events import Sink
from echelon.loop import Counters, Rewindable, Stepping, Yielding
from echelon.parallel.finite import Watch
from echelon.parallel.gradsync import GradSync, Share, Split
from echelon.parallel.word import Word
from echelon.prepare.keep import Keeper
from echelon.strategy import Strategy


class Machine:
    """See the module. One a run; everything that scripts hold reports here."""

    def __init__(self, strategy: Strategy, rank: int, size: int, emit: Sink) -> None:
        self.strategy, self.rank, self.size, self.emit = strategy, rank, size, emit
        self.leads, self.split = True, Split()
        """Samples are counted here: `size` is how many parts a batch has, and several ranks may have the same one."""
        self.word: Word | None = None
        """How all ranks tell each other of a step, where gradients meet among fewer."""
        self.counters = Counters()
        self.syncs: list[GradSync] = []
        self.optimizers: list[Stepping] = []
        self.loaders: list[Rewindable] = []
        self.keepers: list[Keeper] = [self.counters]
        self.after_apply: list[Callable[[Stepping], None]] = []
        self.before_apply: list[Callable[[Stepping], None]] = []
        self.on_lost: list[Callable[[], None]] = []
        self.at_first_begin: list[Callable[[Part], None]] = []
        self.alone = Share(weight=1.0 if strategy.alone else 1.0 / size)
        self.all_here: Callable[[], None] = lambda: None
        self.loop_over: Callable[[Yielding], None] = lambda loop: self.drain()
        """Waits for all workers, where they are not at one place by themselves (async, local); called when a loop is over."""
        self.all_saved: Callable[[], None] = lambda: None
        """Waits until all workers have what they save: nobody changes it before."""
        self.gathered = self.leaving = False
        """That happened, and nothing since; some worker is there because the run is to stop."""
        self.share = self.alone
        self.current: Yielding | None = None
        self.open_loops: list[Yielding] = []
        self.last_loop = 0
        """Samples this rank had in the loop that ended last."""
        self.side_losses: list[Outcome] = []
        self.step_before = 0
        """global_step at the last snapshot: where a lost iteration falls back to."""
        self.begins = 0
        """Micro-steps begun so far, replays included: the same on every rank."""
        self.yielded: dict[int, float] = {}
        """Loop -> its share of the last batch, since the last commit: two that differ cannot share one loss."""
        self.at_snapshot: list[Callable[[], None]] = []
        self.warn: Callable[[str], None] = lambda message: None
        self.before_meeting: Callable[[Stepping], None] = lambda optimizer: None
        self.in_iteration: set[int] = set()
        """Optimizers that were applied since the last batch was yielded."""
        self.committed = True
        """Something was applied since the last snapshot (true at first: the start is a commit)."""
        self.iteration_lost = False
        self.mixed = False
        self.activity_before = 0
        """The activity at the last snapshot."""
        self.following: Callable[[], bool] = lambda: False
        """The script is on its way back to where a run was left: what it does was done already."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before weights or optimizer state change: a checkpoint may still be reading them."""
        self.at_bare_step: Callable[[bool], None] = lambda whole: None
        """Called after a step outside any loop over a loader: did every optimizer that is in use step in its turn?"""
        self.scaled = self.scaler_judges = False
        """A scaler is stepping: the step is over with its update(). One that scales sees by itself what is not finite."""
        self.asked: dict[int, tuple[Any, tuple[float, bool]]] = {}
        """What servers said of the gradients that lie there: see away.squares."""
        self.watches: dict[int, Watch] = {}
        """By the sync's id: whose parts were not finite, where that ends the run."""
        self.at_commit: list[Callable[[Yielding], None]] = []
        """Called when the last step is final: by the loop whose next part is about to be yielded, or that is over."""
        self.after_loss: Callable[[Lost, int], bool] = lambda lost, step: False
        """The failure policy: raises when a replay makes no sense; says whether other workers have to be waited for."""
        self.regroup: Callable[[], None] = lambda: None
        """Waits for them: everything here is as it was at the last commit."""
        self.before_replay: Callable[[], None] = lambda: None
        """Called when batches of a lost step are about to come again."""
        self.kept_at: Yielding | None = None
        """The loop that was about to yield at the last snapshot: where a lost step begins again."""

    # -- begin ---------------------------------------------------------------------------------------------------

    def begin(self, loop: Yielding, part: Part) -> None:
        """A loader is about to yield `part`."""
        self.current = loop
        first, self.at_first_begin = self.at_first_begin, []
        for fn in first:
            fn(part)
        if self.iteration_lost:
            replay.put_back(self)
            self.before_replay()
        elif self.committed:
            self._snapshot(loop)
        self.iteration_lost = False
        self.in_iteration.clear()
        self.open_loops = [*(other for other in self.open_loops if other is not loop), loop]
        self.begins += 1
        self.yielded[id(loop)] = part.count / part.micro.total
        whole = 0 if self.strategy.alone else len(part.micro.ids)
        self.counters.given(part.count if self.leads else 0, whole)
        self.counters.epoch = part.micro.epoch
        self.set_share(self.share_of(part))

    def share_of(self, part: Part) -> Share:
        micro = part.micro
        sums = self.strategy.loss == "sum"
        return Share(
            weight=1.0 if sums else part.count / micro.total,
            counts=part.count > 0,
            last=micro.last,
            sums_to_one=not sums and micro.total == len(micro.ids),
            number=self.begins,
            count=part.count,
        )

    def set_share(self, share: Share) -> None:
        self.share = share
        for sync in self.syncs:
            sync.begin(share)

    def end_loop(self, loop: Yielding) -> None:
        """A loader's loop is over: what is around it (an outer loop, or nothing) is current again."""
        self.loop_over(loop)
        self.last_loop = loop.rank_samples
        if loop in self.open_loops:
            self.open_loops.remove(loop)
        if self.committed:
            for other in self.loaders:
                other.mark()
        self.yielded.pop(id(loop), None)
        if self.current is loop:
            self.current = self.open_loops[-1] if self.open_loops else None
            part = self.current.part if self.current else None
            self.set_share(self.share_of(part) if part else self.alone)

    def over(self, loop: Yielding) -> None:
        """The last thing a loop does."""
        if self.clean:
            for fn in self.at_commit:
                fn(loop)

    def _snapshot(self, loop: Yielding) -> None:
        """The last commit is final: forget how to undo it, remember how to undo what comes."""
        for loader in self.loaders:
            loader.mark()
        self._settle()
        self.kept_at, self.step_before = loop, self.counters.global_step
        for sync in self.syncs:
            sync.refresh()
        for optimizer in self.optimizers:
            optimizer.drop_pre_image()
        for fn in self.at_snapshot:
            fn()
        for keeper in self.keepers:
            keeper.keep()
        self.yielded.clear()
        if self.clean:
            for commit in self.at_commit:
                commit(loop)
        self.committed = False
        self.activity_before = self.activity()

    @property
    def clean(self) -> bool:
        """Nothing is under way that a checkpoint would lose: no gradient since the last commit, no batch to yield again."""
        if self.iteration_lost or self.following() or any(loader.owing for loader in self.loaders):
            return False
        return self.committed or self.activity() == self.activity_before

    def _settle(self) -> None:
        for sync in self.syncs:
            sync.settled()

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Stepping, closure: Callable[[], Any] | None = None) -> Any:
        """The script's optimizer.step().

        1. mid-group: what it holds is sealed, nothing else happens
        2. meet: finish what backward left open; ask every model's meeting how it went
        3. apply: the optimizer, only if all met; otherwise everything since the last commit is undone and replayed
        """
        if self.following():
            result = self._pass_by(optimizer, closure)
        elif closure is not None and not optimizer.elsewhere:
            result = closures.step(self, optimizer, closure)
        elif closure is not None:  # servers know no optimizer that calls it twice
            with torch.enable_grad():
                result = closure()
            self._step(optimizer)
        else:
            result = self._step(optimizer)
        if not self.scaled:
            self.bare_step()
        return result

    def bare_step(self) -> None:
        """No loader says where a step outside any loop ends: it ends here, and what waits for that is told."""
        if self.current is None and self.optimizers:
            self.at_bare_step(all(o.index in self.in_iteration or not _in_use(o) for o in self.optimizers))

    def _step(self, optimizer: Stepping) -> Any:
        # mid-group
        if not self.share.last:
            self.seal(optimizer)
            return None
        # meet
        self.before_meeting(optimizer)
        outcome = self.meet(optimizer)
        if self.iteration_lost:  # another optimizer's step was lost before: the whole iteration runs again
            optimizer.stepped = False
            return None
        if isinstance(outcome, Lost):
            self.lose(outcome, optimizer)
            return None
        # apply
        return self._apply(optimizer, None)

    def _pass_by(self, optimizer: Stepping, closure: Callable[[], Any] | None) -> Any:
        """On the way back: this step was applied in an earlier life. It meets, since every rank is here, and no more."""
        with torch.enable_grad():
            result = closure() if closure is not None else None
        if not self.share.last:
            self.seal(optimizer)
            return result
        for sync in optimizer.syncs:
            sync.finish()
            sync.commit(0)
            if not sync.applies_here:
                sync.forget()
        self.in_iteration.add(optimizer.index)
        return result

    def seal(self, optimizer: Stepping) -> None:
        """The script stepped in mid-group: its gradients so far stay, whatever zero_grad does."""
        optimizer.stepped = False
        params = optimizer.params()
        for sync in optimizer.syncs:
            sync.seal(params)

    def meet(self, optimizer: Stepping) -> Outcome:
        for sync in optimizer.syncs:
            sync.finish()
        step = self.next_step(optimizer)
        outcome = merge([*(sync.commit(step) for sync in optimizer.syncs), *self.side_losses])
        self.side_losses = []
        if self.word is not None:
            outcome = self.word.step(outcome, self.syncs)
        if isinstance(outcome, Met) and not self.iteration_lost and faults.due(step, optimizer.index):
            return Lost((), faults.ON_PURPOSE)
        return outcome

    def finish(self, params: Iterable[Tensor]) -> None:
        """A rank without a backward in this step takes part in the meeting of these parameters here."""
        ids = {id(p) for p in params}
        for sync in self.syncs:
            if sync.holds(ids):
                sync.finish()

    def next_step(self, optimizer: Stepping) -> int:
        """What global_step would be once `optimizer` has stepped: several in one iteration make one step."""
        fresh = not self.in_iteration or optimizer.index in self.in_iteration
        return self.counters.global_step + (1 if fresh else 0)

    def _apply(self, optimizer: Stepping, closure: Callable[[], Any] | None) -> Any:
        try:
            may_step = self.check(optimizer)
        except (LinkLost, PeerLost) as error:  # servers were asked about the gradient
            self.lose(Lost(error.peers, error.message), optimizer)
            return None
        if not may_step:
            judging.skip(self, optimizer)
            return None
        if optimizer.elsewhere:
            away.step(self, optimizer)
            if self.strategy.nonfinite != "pass":
                judging.heed(self)
            return None
        if optimizer.index in self.in_iteration:
            optimizer.twice = True
        if len(self.optimizers) > 1 or optimizer.twice:
            optimizer.keep_pre_image()
        self.before_change()
        result = optimizer.inner_step(closure)
        self.count(optimizer)
        for update in self.after_apply:
            update(optimizer)
        return result

    def check(self, optimizer: Stepping) -> bool:
        """Self-checks, the verdict on what is not finite, and the strategy's own clipping, on gradients that have met. False: nobody makes
        this update."""
        for check in list(self.before_apply):
            check(optimizer)
        shares = {self.yielded[id(loop)] for loop in self.open_loops if id(loop) in self.yielded}
        if len(shares) > 1 and not self.mixed:
            self.mixed = True
            self.warn(
                "two loaders yielded parts of different shares in one step, and a gradient has one weight.\n"
                "  Parts count by the loader that yielded last, unlike in one process.\n"
                "  Give both the same batch size, step once for each, or use run.mean(total, count) for each loss."
            )
        if self.strategy.nonfinite != "pass" and not judging.may_step(self, optimizer):
            return False
        if self.strategy.clip_norm:
            away.clip_norm(self, optimizer.params(), self.strategy.clip_norm)
        return True

    def count(self, optimizer: Stepping) -> None:
        self.counters.global_step = self.next_step(optimizer)
        if optimizer.index in self.in_iteration:
            self.in_iteration.clear()
        self.in_iteration.add(optimizer.index)
        if self.current is None:
            self._settle()  # no loader says when a step is final
        optimizer.stepped = True
        optimizer.applied += 1
        self.committed = True

    def skipped(self, optimizer: Stepping) -> None:
        """A scaler refused the step (inf): the batch is used up and nothing was applied, as in one process."""
        for sync in optimizer.syncs:
            sync.commit(self.next_step(optimizer))
        optimizer.stepped = False
        self.committed = True

    # -- lose ----------------------------------------------------------------------------------------------------

    def lose(self, lost: Lost, optimizer: Stepping) -> None:
        """Nothing is applied: put everything back to the last commit and yield its batches again."""
        replay.lose(self, lost, optimizer)

    def global_loss(self, loss: Any) -> Any:
        """A closure's loss over the global batch; replaced by the run, which has the group."""
        return loss

    def drain(self, all_here: bool = False) -> None:
        """Parameters are those after the last step: before they are saved, evaluated or shown. With `all_here` it is everybody's
        last step, and every worker calls it."""
        if all_here and not self.gathered:
            self.all_here()
        self.gathered = False
        for sync in self.syncs:
            sync.drain()
        if self.strategy.nonfinite != "pass":
            judging.heed(self)

    def drop_group(self) -> bool:
        """The script left a loop in mid-group: what the group holds is of no use. Says whether there was anything."""
        held = any(sync.holding() for sync in self.syncs)
        for sync in self.syncs if held else []:
            sync.forget()
        for forget in self.on_lost if held else []:
            forget()
        return held

    # -- what others ask -----------------------------------------------------------------------------------------

    def activity(self) -> int:
        """Changes whenever a gradient arrives."""
        return sum(sync.activity for sync in self.syncs)

    def wait_s(self) -> float:
        return sum(sync.wait_s for sync in self.syncs)

    def timed_data(self, began: float) -> None:
        now = time.perf_counter()
        times = self.counters.times
        times.began = times.began or began
        times.data_s += now - began


def _in_use(optimizer: Stepping) -> bool:
    return optimizer.applied > 0 or any(p.grad is not None for p in optimizer.params())
