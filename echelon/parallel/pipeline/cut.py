"""Where a recorded model is cut: pure, and with the reason.

A stage is a stretch of nodes in the order of the forward. The slowest stage decides how fast a pipeline goes, so the best cut makes it
as fast as can be; among cuts whose slowest stage is within a few percent of that, the one that sends the fewest bytes is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echelon.errors import StrategyError
from echelon.spelling import unknown

SLACK = 0.05
"""How much slower than the best a cut may be if it sends less."""

MAX_PLACES = 800
"""Beyond this many places to cut, those where most would be sent are not considered."""


@dataclass(frozen=True)
class Item:
    """A node as this module sees it."""

    module: str
    ns: int = 0
    """Forward and backward of one micro-batch."""

    kept: int = 0
    """Bytes that stay from forward to backward."""

    names: tuple[str, ...] = ()
    """Parameters and buffers."""

    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    free: bool = False
    """Computed wherever it is needed: belongs to no stage."""


@dataclass(frozen=True)
class Outline:
    """A record as this module sees it."""

    items: tuple[Item, ...]
    bytes_of: Mapping[int, int] = field(default_factory=dict)
    """Of each value."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every parameter and buffer."""

    outputs: tuple[int, ...] = ()
    """Values that the loss needs: in the last stage."""

    pins: tuple[tuple[int, int], ...] = ()
    """(first, last) nodes that stay together, with all between."""

    modules: Mapping[str, str] = field(default_factory=dict)
    """Every name of a module -> the one that items carry."""

    loss_ns: int = 0
    """The loss, which the last stage computes as well."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a cut."""

    stages: int
    speeds: tuple[float, ...] = ()
    """Of each stage, relative: workers that share its micro-batches; by default all alike."""

    memory: int = 0
    """Bytes that a stage may use; 0 for no limit."""

    state_factor: float = 4.0
    """What a byte of parameters costs in all: with its gradient and Adam's two moments four."""

    in_flight: tuple[int, ...] = ()
    """Micro-batches of each stage between forward and backward; by default stages - its number, as with 1F1B."""

    def speed(self, stage: int) -> float:
        return self.speeds[stage] if self.speeds else 1.0

    def flight(self, stage: int) -> int:
        return self.in_flight[stage] if self.in_flight else self.stages - stage


@dataclass(frozen=True)
class Cut:
    """Which node belongs to which stage."""

    begins: tuple[int, ...]
    """The first node of each stage."""

    stages: tuple[int, ...]
    """The stage of each node, -1 for one that is computed wherever it is needed."""

    owners: Mapping[str, int]
    """The first stage that uses a parameter or buffer; 0 for those that nobody uses."""

    shared: Mapping[str, tuple[int, ...]]
    """Those that several stages use, with all of them: each has a copy, whose gradients are summed."""

    reason: str

    @property
    def num_stages(self) -> int:
        return len(self.begins)

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and buffer with all stages that have it."""
        return {name: self.holders(name) for name in self.owners}

    def holders(self, name: str) -> tuple[int, ...]:
        """All stages that have this parameter or buffer."""
        return self.shared.get(name) or (self.owners[name],)


def find(outline: Outline, wish: Wish) -> Cut:
    """The cut whose slowest stage is fastest, sending least among those about as fast."""
    places = _fewer(outline, possible(outline))
    if len(places) + 1 < wish.stages:
        raise StrategyError(
            f"the model cannot be cut into {wish.stages} stages: there are places for {len(places) + 1}",
            remedy=f"Use pipeline={len(places) + 1} or less. Modules of torch.nn are never cut inside, nor are nodes that write into the same memory.",
        )
    table = _Table(outline, wish, places)
    best = table.fastest()
    if best is None:
        raise _too_large(outline, wish, table)
    begins = table.leanest(best * (1 + SLACK))
    assert begins is not None
    return assigned(outline, begins, _words(outline, wish, begins))


def by_names(outline: Outline, text: str, stages: int) -> Cut:
    """`layer3+layer4.1`: each named module begins a stage."""
    names = [name.strip() for name in text.split("+") if name.strip()]
    if len(names) + 1 != stages:
        raise StrategyError(
            f"cut={text} names the first modules of {len(names)} stages after the first, and there are {stages} stages",
            remedy=f"Name {stages - 1}, joined by `+`, or leave cut out.",
        )
    allowed = set(possible(outline))
    begins = [0]
    for name in names:
        begins.append(_first_inside(outline, name))
        if begins[-1] <= begins[-2]:
            raise StrategyError(
                f"cut={text}: `{name}` does not begin after the stage before it",
                remedy="Name modules in the order in which forward calls them; the first stage begins by itself.",
            )
        if begins[-1] not in allowed:
            raise StrategyError(
                f"cut={text}: a stage cannot begin with `{name}`, because it shares memory that is written to with what comes before",
                remedy="Cut at another module, or replace the in-place operation.",
            )
    return assigned(outline, begins, _words(outline, Wish(stages), begins))


def possible(outline: Outline) -> list[int]:
    """Nodes with which a stage may begin: not the first, not inside of what must stay together."""
    real = [at for at, item in enumerate(outline.items) if not item.free]
    shut = [False] * (len(outline.items) + 1)
    for lo, hi in outline.pins:
        shut[lo + 1 : hi + 1] = [True] * (hi - lo)
    return [at for at in real[1:] if not shut[at]]


def assigned(outline: Outline, begins: Sequence[int], reason: str) -> Cut:
    """The stage of every node and name, for stages that begin there."""
    stages = []
    at = 0
    users: dict[str, set[int]] = {}
    for index, item in enumerate(outline.items):
        while at + 1 < len(begins) and index >= begins[at + 1]:
            at += 1
        stages.append(-1 if item.free else at)
        for name in item.names:
            users.setdefault(name, set()).add(at)
    owners = {name: min(users.get(name, {0})) for name in outline.sizes}
    shared = {name: tuple(sorted(users[name])) for name in outline.sizes if len(users.get(name, ())) > 1}
    return Cut(tuple(begins), tuple(stages), owners, shared, reason)


def follow(outline: Outline, first: Cut) -> Cut:
    """The cut of another record of the same model (other shapes, another way through it): parameters stay where `first` put them."""
    at = 0
    begins = [0]
    for index, item in enumerate(outline.items):
        held = [set(first.holders(name)) for name in item.names if name in first.owners]
        may = set.intersection(*held) if held else {at}
        if at in may:
            continue
        later = [stage for stage in sorted(may) if stage > at]
        if not later:
            raise StrategyError(
                f"with these inputs the model comes to `{item.module}` in stage {at}, but its parameters are in stage {min(may, default=0)}",
                remedy="The order of layers may depend on inputs only inside a stage: choose another cut=, or use --strategy sharded.",
            )
        begins += [index] * (later[0] - at)
        at = later[0]
    begins += [len(outline.items)] * (first.num_stages - len(begins))
    check(outline, begins)
    found = assigned(outline, begins, f"as before: {first.reason}")
    return Cut(found.begins, found.stages, first.owners, first.shared, found.reason)


def check(outline: Outline, begins: Sequence[int]) -> None:
    """Raises StrategyError where a stage begins inside of what must stay together."""
    inside = [index for lo, hi in outline.pins for index in begins[1:] if lo < index <= hi]
    if inside:
        raise StrategyError(
            f"with these inputs the model cannot be cut at `{outline.items[inside[0]].module}`: memory is written to on both sides",
            remedy="Choose another cut=, or replace the in-place operation.",
        )


def crossing(outline: Outline, places: Sequence[int]) -> dict[int, int]:
    """Bytes that a cut before each of these nodes sends, there and (gradients) back."""
    made: dict[int, int] = {}
    last: dict[int, int] = dict.fromkeys(outline.outputs, len(outline.items))
    for at, item in enumerate(outline.items):
        if not item.free:
            made.update(dict.fromkeys(item.gives, at))
    for at, item in enumerate(outline.items):
        for value in item.takes:
            last[value] = max(last.get(value, 0), at)
    total = [0] * (len(outline.items) + 2)
    for value, maker in made.items():
        if value in last and last[value] > maker:
            total[maker + 1] += outline.bytes_of.get(value, 0)
            total[last[value] + 1] -= outline.bytes_of.get(value, 0)
    for at in range(1, len(total)):
        total[at] += total[at - 1]
    return {place: total[place] for place in places}


def _fewer(outline: Outline, places: list[int]) -> list[int]:
    if len(places) <= MAX_PLACES:
        return places
    sent = crossing(outline, places)
    return sorted(sorted(places, key=lambda place: (sent[place], place))[:MAX_PLACES])


class _Table:
    """Dynamic programming over places: stage s is a stretch from one place to another."""

    def __init__(self, outline: Outline, wish: Wish, places: list[int]) -> None:
        self.wish = wish
        self.at = [0, *places, len(outline.items)]
        self.sent = [0, *crossing(outline, places).values(), 0]
        self.ends = len(self.at) - 1
        sums = [0]
        kept = [0]
        for item in outline.items:
            sums.append(sums[-1] + (0 if item.free else item.ns))
            kept.append(kept[-1] + item.kept)
        self.time = [sums[place] for place in self.at]
        self.time[-1] += outline.loss_ns
        self.kept = [kept[place] for place in self.at]
        self.outline = outline
        self._state: dict[tuple[int, int], int] = {}

    def cost(self, stage: int, lo: int, hi: int) -> float:
        """Time of the stretch as that stage, or infinity where it does not fit."""
        if self.wish.memory and self.bytes(stage, lo, hi) > self.wish.memory:
            return float("inf")
        return (self.time[hi] - self.time[lo]) / self.wish.speed(stage)

    def bytes(self, stage: int, lo: int, hi: int) -> int:
        kept = (self.kept[hi] - self.kept[lo]) * self.wish.flight(stage)
        return kept + int(self.wish.state_factor * self._parameters(lo, hi))

    def _parameters(self, lo: int, hi: int) -> int:
        """Bytes of parameters in a stretch, each once."""
        if (lo, hi) not in self._state:
            sizes = self.outline.sizes
            seen: set[str] = set()
            total = 0
            by = {place: index for index, place in enumerate(self.at)}
            for index in range(self.at[hi] - 1, -1, -1):
                for name in self.outline.items[index].names:
                    if name not in seen:
                        seen.add(name)
                        total += sizes.get(name, 0)
                if index in by:
                    self._state[by[index], hi] = total
        return self._state[lo, hi]

    def fastest(self) -> float | None:
        """The time of the slowest stage in the best cut, or None if nothing fits."""
        row = [float("inf")] * (self.ends + 1)
        row[0] = 0.0
        for stage in range(self.wish.stages):
            new = [float("inf")] * (self.ends + 1)
            for hi in range(1, self.ends + 1):
                for lo in range(hi - 1, -1, -1):
                    alone = self.cost(stage, lo, hi)
                    if alone >= new[hi] and alone != 0:
                        break
                    new[hi] = min(new[hi], max(row[lo], alone))
            row = new
        return row[self.ends] if row[self.ends] != float("inf") else None

    def leanest(self, bound: float) -> list[int] | None:
        """First nodes of stages, none slower than `bound`, sending least; equal ones by the sum of squares of their times."""
        none = (float("inf"), 0.0)
        row: list[tuple[float, float]] = [none] * (self.ends + 1)
        row[0] = (0.0, 0.0)
        chosen: list[list[int]] = []
        for stage in range(self.wish.stages):
            new = [none] * (self.ends + 1)
            back = [0] * (self.ends + 1)
            for hi in range(1, self.ends + 1):
                for lo in range(hi - 1, -1, -1):
                    alone = self.cost(stage, lo, hi)
                    if alone > bound:
                        break
                    if row[lo][0] == float("inf"):
                        continue
                    total = (row[lo][0] + self.sent[lo], row[lo][1] + alone * alone)
                    if total < new[hi]:
                        new[hi], back[hi] = total, lo
            chosen.append(back)
            row = new
        if row[self.ends][0] == float("inf"):
            return None
        ends = [self.ends]
        for back in reversed(chosen):
            ends.append(back[ends[-1]])
        return [self.at[index] for index in reversed(ends[1:])]


def _first_inside(outline: Outline, name: str) -> int:
    path = outline.modules.get(name)
    if path is None:
        raise unknown(name, [known for known in outline.modules if known], "module in cut")
    for at, item in enumerate(outline.items):
        if not item.free and (item.module == path or item.module.startswith(path + ".")):
            return at
    raise StrategyError(
        f"cut names `{name}`, in which this forward computes nothing",
        remedy="Name a module that is called, or one inside it.",
    )


def _words(outline: Outline, wish: Wish, begins: Sequence[int]) -> str:
    ends = [*begins[1:], len(outline.items)]
    parts = []
    for stage, (lo, hi) in enumerate(zip(begins, ends, strict=True)):
        real = [item for item in outline.items[lo:hi] if not item.free]
        ns = sum(item.ns for item in real) + (outline.loss_ns if stage == len(begins) - 1 else 0)
        state = {name for item in real for name in item.names}
        size = sum(outline.sizes.get(name, 0) for name in state)
        first = real[0].module if real else ""
        parts.append(
            f"{stage}: from {first or 'the model itself'}, {ns / 1e6:.2f} ms, {size / 2**20:.1f} MiB"
        )
    sent = crossing(outline, begins[1:])
    return f"{'; '.join(parts)}; {sum(sent.values()) / 2**20:.2f} MiB cross a micro-batch"


def _too_large(outline: Outline, wish: Wish, table: _Table) -> StrategyError:
    total = int(wish.state_factor * sum(outline.sizes.values()))
    return StrategyError(
        f"no cut into {wish.stages} stages fits {wish.memory / 2**20:.0f} MiB a stage: parameters with their gradients and optimizer state are "
        f"{total / 2**20:.0f} MiB, what is kept for backward {table.kept[-1] / 2**20:.0f} MiB a micro-batch",
        remedy="Use more stages, smaller micro-batches (microbatches=…), or tensor= or sharded beside it.",
    )
