"""GradSync: how the gradients of one model meet. The contract that every form fulfils."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Op, Outcome
from echelon.errors import PeerLost
from echelon.mesh.layout import Placed
from echelon.parallel.wire import Wire
from echelon.ps.recipes import Recipe

SPLIT_S = 1800.0

Groups = Sequence[tuple[Recipe, Sequence[Tensor]]]
"""Each parameter group's recipe and parameters."""


@dataclass(frozen=True)
class Share:
    """What a rank's gradients of the current micro-step count for."""

    weight: float = 1.0
    """Gradients are multiplied by this before they are summed over ranks; over a group the weights sum to one."""

    counts: bool = True
    """False for a stand-in: its gradient is dropped, not multiplied by 0 (it may be NaN)."""

    last: bool = True
    """False in the middle of a group (accumulate, microbatches): gradients stay here until its last micro-step."""

    sums_to_one: bool = True
    """Whether the weights of all ranks in this micro-step sum to one: not inside a group, nor with loss=sum."""

    unseen: bool = False
    """Nobody looks at `.grad` before the next micro-step begins, which follows at once: gradients may add up there. Not with `last`, and only
    where it counts."""

    number: int = 0
    """Of the micro-step, since the start: the same on every rank that is in the same place."""

    count: int = 1
    """Samples of this micro-step that are this rank's."""

    closing: float = 1.0
    """Multiplies what the group holds when it meets: 1 / tokens where the normaliser is known only then."""


@dataclass
class Split:
    """How the model lies over ranks where it is split; forms fill it in, and what is said of all elements is asked here."""

    placed: dict[int, Placed] = field(default_factory=dict)
    """By a parameter's id."""

    group: Group | None = None
    """Those that hold one replica of the model together."""

    def over(self, params: Iterable[Tensor]) -> Group | None:
        """Who must be asked about these parameters: nobody where all of them are whole here."""
        return self.group if self.placed and any(id(p) in self.placed for p in params) else None

    def counts(self, param: Tensor) -> bool:
        """Does this rank answer for what it has of a parameter?"""
        placed = self.placed.get(id(param))
        if placed is None:
            return self.group is None or self.group.rank == 0
        return placed.counts and bool(placed.runs)

    def meet(self, x: Tensor, op: Op = "sum") -> Tensor:
        """x over the group, in place. PeerLost when one of them is gone."""
        if self.group is not None and not self.group.local:
            outcome = self.group.all_reduce(x, op).wait(Deadline.after(SPLIT_S))
            if isinstance(outcome, Lost):
                raise PeerLost(
                    f"a peer was lost in a sum over the model: {outcome.reason}", peers=outcome.peers
                )
        return x


class GradSync(Protocol):
    """How the gradients of one model meet.

    Provisional until commit: `withdraw` (zero_grad) takes back what was not sealed, a further backward adds. After a
    backward of a group's last micro-step `.grad` is the global gradient, or None for what no rank used.
    """

    applies_here: bool
    """False when the optimizer runs elsewhere (on a server)."""

    wait_s: float
    """Seconds spent waiting for peers so far."""

    activity: int
    """Grows with every gradient that arrives."""

    wire: Wire
    """What carries its gradients."""

    stop_wanted: Callable[[], bool]
    """Asked in every meeting: was this rank told to stop?"""

    stop_seen: bool
    """Some rank was, and every rank knows it since the same meeting."""

    def holds(self, params: set[int]) -> bool:
        """Does any of these parameters (by id) meet here?"""
        ...

    def unused(self) -> list[str]:
        """Names of trained parameters that have no gradient now."""
        ...

    def begin(self, share: Share) -> None:
        """A micro-step begins; later backwards count for this much."""
        ...

    def finish(self) -> None:
        """The backstop: takes part in the meeting of this micro-step if no backward did so here."""
        ...

    def seal(self, params: Iterable[Tensor]) -> None:
        """The script stepped in the middle of a group: what these hold now stays, whatever zero_grad does."""
        ...

    def withdraw(self, params: Iterable[Tensor]) -> None:
        """zero_grad: drops what was not sealed."""
        ...

    def applied(self, params: Iterable[Tensor]) -> None:
        """An optimizer stepped on these: what coding left out of them stays owed."""
        ...

    def holding(self) -> bool:
        """Does something of earlier micro-steps of the group lie here?"""
        ...

    def commit(self, step: int) -> Outcome:
        """Did every backward since the last commit meet? Nothing is applied unless Met."""
        ...

    def settled(self) -> None:
        """The step was applied: what was learned from it may be used from the next one on."""
        ...

    def lost(self) -> Outcome:
        """How the backwards since the last commit went, without ending anything."""
        ...

    def drain(self) -> None:
        """Blocks until the parameters have seen every step that was taken; for forms in which they may be behind."""
        ...

    def fresh(self) -> None:
        """This worker waited for data and is about to begin: where others went on meanwhile, its parameters are the newest."""
        ...

    def forget(self) -> None:
        """The step was lost: drops all gradients, sealed ones too."""
        ...

    def layout(self) -> dict[str, Any]:
        """How gradients lie in their messages, as plain data: sums of three and more may depend on it to the last bit."""
        ...

    def lay(self, layout: dict[str, Any]) -> None:
        """Back to a layout of before; one of other parameters is ignored. Only between steps."""
        ...

    def refresh(self) -> None:
        """Parameters may have been frozen or thawed since; called between steps."""
        ...

    def renew(self) -> None:
        """The group is another one since: what lost operations may still write to is used no more. Only after forget()."""
        ...


class Applying(GradSync, Protocol):
    """A GradSync whose optimizer runs elsewhere (`applies_here` is False). Every rank calls the same in the same order."""

    made: int
    """Updates that the last step brought: one, where every worker's part is in every one."""

    undoes: bool
    """Steps that name their iteration can be undone, all of it."""

    suspects: list[tuple[int, str]]
    """After squares(): whose parts are not finite, and in which parameter."""

    def squares(self, params: Iterable[Tensor]) -> tuple[float, bool]:
        """The sum of squares of the global gradient of these, and whether it is finite."""
        ...

    def clip(self, params: Iterable[Tensor], factor: float) -> None:
        """The next step of these uses `factor` times their gradients."""
        ...

    def apply(self, optimizer: int, groups: Groups, since: int | None = None) -> Outcome:
        """The step of the optimizer of this number. Parameters have their new values when it gives Met. `since` names the iteration, where
        several steps make one."""
        ...

    def undo(self, since: int) -> None:
        """That iteration is lost on every rank: its steps did not happen, and parameters are those of before. Where ranks come together
        anew in a term of the servers, these undo it, and undone() is called instead. Raises LinkLost, PeerLost."""
        ...

    def undone(self, since: int) -> None:
        """The servers have undone that iteration: if parameters here have seen a step of it, they become what the servers have."""
        ...

    def rejoin(self, brings: bool) -> None:
        """In a new term on the servers: parameters here are those after the last commit. One worker brings them there."""
        ...

    def state(self, optimizer: int, params: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        """The optimizer's state by the parameter's id. Any rank may ask, between steps."""
        ...

    def load(self, optimizer: int, groups: Groups, state: Any) -> None:
        """Parameters, and the optimizer's state by parameter, as rank 0 has them, count from now on."""
        ...


def applying(sync: GradSync) -> Applying | None:
    """The same meeting, if its optimizer runs elsewhere."""
    return None if sync.applies_here else cast(Applying, sync)
