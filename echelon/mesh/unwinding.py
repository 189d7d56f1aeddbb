"""How much memory the backward of a graph takes at the most, from sizes alone: pure.

A backward begins with all that the forward kept. Each operation then makes gradients for those before it, and what it kept goes once it is
over; so the most is needed near the beginning, and it is more than what was kept. Gradients of parameters go as soon as they are handed over:
where they stay is counted elsewhere (memory.py)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operation:
    """One operation of a forward, as its backward sees it."""

    order: int
    """Of those whose gradients are there, the one with the highest number runs first."""

    gives: tuple[tuple[int, int, int], ...] = ()
    """(operation, which of its outputs, bytes) of the gradients that it makes."""

    keeps: tuple[Hashable, ...] = ()
    """Blocks of memory that the forward kept for it; several operations may keep the same."""

    passes: bool = False
    """It gives on the gradient that it was given, in the same memory: a view, an addition."""


@dataclass
class _Block:
    """A gradient."""

    nbytes: int
    users: int = 0


@dataclass
class _Walk:
    held: int
    """Bytes that were kept, or are gradients, now."""

    at: dict[int, dict[int, _Block]] = field(default_factory=dict)
    """Gradients that wait, by operation and output."""

    def make(self, nbytes: int) -> _Block:
        self.held += nbytes
        return _Block(nbytes)

    def put(self, block: _Block, operation: int, output: int) -> None:
        """A second gradient of the same output is added to the first: in its memory, where nobody else reads that."""
        there = self.at.setdefault(operation, {})
        old, block.users = there.get(output), block.users + 1
        if old is None:
            there[output] = block
            return
        if old.users > 1:
            old.users -= 1
            there[output] = self.make(old.nbytes)
            there[output].users = 1
        self.drop(block)

    def drop(self, block: _Block) -> None:
        block.users -= 1
        if block.users == 0:
            self.held -= block.nbytes


def most(
    operations: Sequence[Operation], sizes: Mapping[Hashable, int], begins: Sequence[tuple[int, int, int]]
) -> int:
    """The most bytes at once of what was kept (`sizes` by block) and of gradients. `begins`: (operation, output, bytes) of the gradients
    with which it begins."""
    walk = _Walk(sum(sizes.values()))
    users = Counter(key for operation in operations for key in set(operation.keeps))
    waits = Counter(target for operation in operations for target in {to for to, _, _ in operation.gives})
    for to, output, nbytes in begins:
        walk.put(walk.make(nbytes), to, output)
    ready = [(-operations[to].order, to) for to in {to for to, _, _ in begins} if not waits[to]]
    heapq.heapify(ready)
    found = walk.held
    while ready:
        _, now = heapq.heappop(ready)
        operation, given = operations[now], list(walk.at.pop(now, {}).values())
        for to, output, nbytes in operation.gives:
            same = operation.passes and given and given[0].nbytes == nbytes
            walk.put(given[0] if same else walk.make(nbytes), to, output)
        found = max(found, walk.held)
        for block in given:
            walk.drop(block)
        for key in set(operation.keeps):
            users[key] -= 1
            walk.held -= sizes.get(key, 0) if not users[key] else 0
        for to in {to for to, _, _ in operation.gives}:
            waits[to] -= 1
            if not waits[to]:
                heapq.heappush(ready, (-operations[to].order, to))
    return found
