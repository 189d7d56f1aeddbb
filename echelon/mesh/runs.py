"""Arithmetic of runs: cut at elements, laid over each other, checked to cover a tensor once. Pure, and never an element at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from echelon.mesh.layout import Runs

STEPS_A_PIECE = 256
"""How much work the check of a cover takes for each piece: more pieces side by side in a row no layout of ours has."""


@dataclass(frozen=True, slots=True)
class Patch:
    """What two rows of runs have in common: `count` stretches of `length` elements. Places count in each side's own elements."""

    at: int
    step: int
    other_at: int
    other_step: int
    length: int
    count: int


def plain(run: Runs) -> Runs:
    """The same elements in the same order; one run where runs touch each other."""
    if run.count == 1 or run.length == run.period:
        return Runs(run.start, run.length * run.count)
    return run


def cut(runs: Iterable[Runs], start: int, stop: int) -> Iterator[tuple[int, Runs]]:
    """Elements [start, stop) of what `runs` hold, each piece with its place among them: at most two more than there are runs, for
    each of them."""
    at = 0
    for run in runs:
        first, last = max(start - at, 0), min(stop - at, run.numel)
        if first < last or (run.numel == 0 and start == at == stop):
            yield from ((at + place, piece) for place, piece in _cut_one(plain(run), first, last))
        at += run.numel


def _cut_one(run: Runs, first: int, last: int) -> Iterator[tuple[int, Runs]]:
    if run.count == 1:
        yield first, Runs(run.start + first, last - first)
        return
    row, inside = divmod(first, run.length)
    if inside:  # from the middle of a run to its end
        upto = min(last, (row + 1) * run.length)
        yield first, Runs(run.start + row * run.period + inside, upto - first)
        first, row = upto, row + 1
    rows = (last - first) // run.length
    if rows:
        yield first, plain(Runs(run.start + row * run.period, run.length, run.period, rows))
        first, row = first + rows * run.length, row + rows
    if first < last:
        yield first, Runs(run.start + row * run.period, last - first)


def overlaps(one: Runs, other: Runs) -> Iterator[Patch]:
    """The elements that both hold. Few patches where one of them is a single run or both have one period; else one and more a run of
    whichever has fewer."""
    one, other = plain(one), plain(other)
    if other.count == 1:
        yield from _with_single(one, other)
    elif one.count == 1:
        yield from map(_turned, _with_single(other, one))
    elif one.period == other.period:
        yield from _alike(one, other)
    elif one.count <= other.count:
        for row in range(one.count):
            base = row * one.length
            for patch in _with_single(other, Runs(one.start + row * one.period, one.length)):
                turned = _turned(patch)
                yield Patch(turned.at + base, turned.step, turned.other_at, turned.other_step, turned.length, turned.count)  # fmt: skip
    else:
        yield from map(_turned, overlaps(other, one))


def _with_single(runs: Runs, single: Runs) -> Iterator[Patch]:
    """`single` is one run: its stretch of the other's elements lies together."""
    start, stop = _before(runs, single.start), _before(runs, single.start + single.length)
    for at, piece in cut((runs,), start, stop) if start < stop else ():
        yield Patch(at, piece.length, piece.start - single.start, piece.period, piece.length, piece.count)


def _before(runs: Runs, element: int) -> int:
    """How many elements of `runs` lie before this one of the tensor."""
    if element <= runs.start:
        return 0
    if runs.count == 1:
        return min(element - runs.start, runs.length)
    row, inside = divmod(element - runs.start, runs.period)
    return runs.numel if row >= runs.count else row * runs.length + min(inside, runs.length)


def _alike(one: Runs, other: Runs) -> Iterator[Patch]:
    """Both have one period, so a run meets at most two of the other's, and all do alike."""
    ahead = other.start - one.start
    for shift in (-ahead // one.period, -ahead // one.period + 1):
        offset = ahead + shift * one.period  # of the other's run number i + shift from run number i
        low, high = max(0, offset), min(one.length, offset + other.length)
        first, last = max(0, -shift), min(one.count, other.count - shift)
        if low < high and first < last:
            there = (first + shift) * other.length + low - offset
            yield Patch(first * one.length + low, one.length, there, other.length, high - low, last - first)


def _turned(patch: Patch) -> Patch:
    return Patch(patch.other_at, patch.other_step, patch.at, patch.step, patch.length, patch.count)


def uncovered(numel: int, pieces: Sequence[Runs]) -> str:
    """Why the pieces do not hold each of `numel` elements exactly once; "" when they do.

    Goes through the tensor run by run, and over all rows that look alike in one go. The work is bounded by the number of pieces: what
    is more irregular than any layout is refused.
    """
    if len(pieces) == 1 and pieces[0] == Runs(0, numel):
        return ""
    waiting: dict[int, tuple[Runs, int]] = {}
    """Where the next run of a piece begins -> the piece, and how many runs it still has."""

    def wait(at: int, piece: Runs, left: int) -> str:
        if left and at in waiting:
            return f"element {at} is in two"
        if left:
            waiting[at] = (piece, left)
        return ""

    for piece in map(plain, pieces):
        last = piece.start + (piece.count - 1) * piece.period + piece.length
        if piece.count < 1 or min(piece.start, piece.length) < 0 or last > numel:
            return f"a piece begins at {piece.start} and ends at {last} of {numel}"
        if piece.count > 1 and not 0 < piece.length < piece.period:
            return f"runs of {piece.length} elements are {piece.period} apart"
        if piece.length and (why := wait(piece.start, piece, piece.count)):
            return why
    at, steps = 0, STEPS_A_PIECE * (len(pieces) + 4)
    while at < numel:
        chain, end = _chain(at, waiting)
        steps -= len(chain)
        if not chain or steps < 0:
            return f"element {at} is in none" if not chain else "they are too irregular to be checked"
        times = _alike_rows(chain, end - at)
        for begins, piece, left in chain:
            if why := wait(begins + times * piece.period, piece, left - times):
                return why
        at = at + times * chain[0][1].period if times > 1 else end
    return f"element {min(waiting)} is in two" if waiting else ""


def _chain(at: int, waiting: dict[int, tuple[Runs, int]]) -> tuple[list[tuple[int, Runs, int]], int]:
    """The runs that follow each other from `at` on, taken out of `waiting`, until the first one's next would begin; where they end."""
    chain: list[tuple[int, Runs, int]] = []
    end, full = at, at + 1
    while end < full and end in waiting:
        piece, left = waiting.pop(end)
        chain.append((end, piece, left))
        if len(chain) == 1:
            full = at + (piece.period if left > 1 else piece.length)
        end += piece.length
    return chain, end


def _alike_rows(chain: list[tuple[int, Runs, int]], width: int) -> int:
    """How often the chain comes again, itself counted."""
    period = chain[0][1].period
    if width == period and all(piece.period == period for _, piece, _ in chain):
        return min(left for _, _, left in chain)
    return 1
