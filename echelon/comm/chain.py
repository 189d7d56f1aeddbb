"""Operations that follow one another, as one Work: a generator that gives each operation's Work and goes on when it met.

Between two operations there is something to compute, and Work has no thread of its own: it is done by whoever waits. Chains
of one group advance in turns, so that the second operation of the first chain is under way while the first of the next one
is waited for. Every rank waits for its chains in the same order, so every rank begins the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.clock import Deadline
from echelon.comm.group import Met, Outcome, Work


class Chains:
    """The chains of one group that are under way."""

    def __init__(self) -> None:
        self.flying: list[Chain] = []

    def begin(self, steps: Iterator[Work]) -> Chain:
        """Runs `steps` up to its first operation. The rest runs in wait(); after Lost, never."""
        chain = Chain(self, steps)
        chain.go_on()
        if chain.outcome is None:
            self.flying.append(chain)
        return chain

    def turn(self, deadline: Deadline) -> None:
        """Every chain under way goes one operation further."""
        for chain in list(self.flying):
            chain.advance(deadline)
        self.flying = [chain for chain in self.flying if chain.outcome is None]

    def forget(self) -> None:
        """Nobody will wait for those under way: their meeting was given up."""
        self.flying = []


class Chain:
    def __init__(self, chains: Chains, steps: Iterator[Work]) -> None:
        self.chains, self.steps = chains, steps
        self.work: Work | None = None
        self.outcome: Outcome | None = None

    def go_on(self) -> None:
        self.work = next(self.steps, None)
        if self.work is None:
            self.outcome = Met()

    def advance(self, deadline: Deadline) -> None:
        assert self.work is not None
        outcome = self.work.wait(deadline)
        if isinstance(outcome, Met):
            self.go_on()
        else:
            self.outcome = outcome

    def wait(self, deadline: Deadline) -> Outcome:
        while self.outcome is None:
            if self in self.chains.flying:
                self.chains.turn(deadline)
            else:
                self.advance(deadline)
        return self.outcome
