"""What each stage does for a record: its nodes in order, what it takes and gives, when a value is needed no longer. Pure."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.parallel.pipeline import cut
from echelon.parallel.pipeline.contract import MicroBatch, Port
from echelon.parallel.pipeline.cut import Cut, Item, Outline
from echelon.parallel.pipeline.record import Named, Node, Record, Setting, parts_of
from echelon.parallel.pipeline.trace import Records


@dataclass(frozen=True)
class Stretch:
    """Nodes that run one after the other under the same setting."""

    setting: Setting
    nodes: tuple[Node, ...]
    needs: tuple[int, ...]
    """Values that it uses and does not make."""

    leaves: tuple[int, ...]
    """Values that it makes and that are needed after it."""

    dead: tuple[tuple[int, ...], ...]
    """Of each node, the values that nobody needs after it."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters and buffers that its nodes may use."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.names))


@dataclass(frozen=True)
class Plan:
    """One stage of one record."""

    stretches: tuple[Stretch, ...]
    takes: tuple[Port, ...]
    gives: tuple[Port, ...]
    inputs: tuple[int, ...]
    """Model inputs that it uses."""

    written: frozenset[int]
    """Of what it takes or is given, the values that it writes into: it does so in a copy."""

    names: tuple[str, ...]
    """Parameters and buffers that its calls take as they are, not inside a module."""

    last: bool
    record: Record

    @property
    def names_of_calls(self) -> list[tuple[str, ...]]:
        """Parameters and buffers that its calls may use, in the order of the calls; those of a stretch that is computed again together."""
        found: list[tuple[str, ...]] = []
        for stretch in self.stretches:
            again = stretch.setting.region >= 0
            found += [stretch.names] if again else [node.names for node in stretch.nodes]
        return found


def outline(record: Record, costs: Sequence[int] = (), loss_ns: int = 0) -> Outline:
    """A record as cut.py sees it; `costs` are nanoseconds a node, as measure.py gives them."""
    items = tuple(
        Item(node.module, costs[at] if costs else 0, node.kept, node.names, node.takes, node.gives, node.free)
        for at, node in enumerate(record.nodes)
    )
    sizes = {number: meta.nbytes * (2 if meta.grad else 1) for number, meta in enumerate(record.values)}
    return Outline(items, sizes, record.sizes, record.outputs, record.pins, record.modules, loss_ns)


def plans(record: Record, made: Cut) -> tuple[Plan, ...]:
    """The plan of every stage."""
    mine = [_nodes(record, made, stage) for stage in range(made.num_stages)]
    ports: list[list[Port]] = [[] for _ in mine]
    for stage, nodes in enumerate(mine):
        here = {number for node in nodes for number in node.gives}
        for number in sorted(
            _wanted(record, nodes, stage == made.num_stages - 1) - here - set(record.inputs)
        ):
            meta = record.values[number]
            source = made.stages[meta.maker]
            assert 0 <= source < stage, f"value {number} of stage {source} is needed in stage {stage}"
            ports[stage].append(Port(number, source, stage, meta.shape, meta.dtype, meta.grad))
    result = []
    for stage, nodes in enumerate(mine):
        last = stage == made.num_stages - 1
        gives = sorted(
            (p for all_ports in ports for p in all_ports if p.source == stage),
            key=lambda p: (p.value, p.target),
        )
        wanted = _wanted(record, nodes, last)
        inputs = tuple(number for number in dict.fromkeys(record.inputs) if number in wanted)
        writes = {record.values[old].storage for node in nodes for old, _ in node.renames}
        come = (*inputs, *(port.value for port in ports[stage]))
        written = frozenset(number for number in come if record.values[number].storage in writes)
        direct = [(node.args, node.kwargs) for node in nodes]
        refs = parts_of((direct, record.output if last else ()), Named)
        names = tuple(dict.fromkeys(ref.name for ref in refs))
        after = {port.value for port in gives} | (set(record.outputs) if last else set())
        result.append(
            Plan(
                _stretches(nodes, after),
                tuple(ports[stage]),
                tuple(gives),
                inputs,
                written,
                names,
                last,
                record,
            )
        )
    return tuple(result)


class Plans:
    """The plans of a model that was cut, for any micro-batch: `first` was found for one record, the others follow it."""

    def __init__(self, model: nn.Module, records: Records, first: Record, made: Cut) -> None:
        self.model, self.records, self.first, self.cut = model, records, first, made
        self._known: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._plans: dict[int, tuple[Plan, ...]] = {}

    def of(self, micro: MicroBatch, mode: Hashable = None) -> tuple[Plan, ...]:
        """The plan of every stage for this micro-batch; `mode`: see Records.of. Records that are forgotten take their plans along."""
        record = self.records.of(micro.args, micro.kwargs, mode)
        if self._known.get(id(record)) is not record:
            for old in set(self._plans) - set(self._known):
                del self._plans[old]
            self._known[id(record)] = record
            self._plans[id(record)] = plans(record, self._cut_of(record))
        return self._plans[id(record)]

    def _cut_of(self, record: Record) -> Cut:
        shape = outline(record)
        if record.shape_of_calls() == self.first.shape_of_calls():
            cut.check(shape, self.cut.begins)  # training writes where evaluation only reads
            return self.cut
        return cut.follow(shape, self.cut)


def _nodes(record: Record, made: Cut, stage: int) -> list[Node]:
    """The nodes of a stage, and those free ones that they or the output need."""
    own = {at for at, of in enumerate(made.stages) if of == stage}
    wanted = set(record.outputs) if stage == made.num_stages - 1 else set()
    for at in reversed(range(len(record.nodes))):
        node = record.nodes[at]
        if at in own or (node.free and any(number in wanted for number in node.gives)):
            own.add(at)
            wanted.update(node.takes)
    return [node for at, node in enumerate(record.nodes) if at in own]


def _wanted(record: Record, nodes: Iterable[Node], last: bool) -> set[int]:
    found = {number for node in nodes for number in node.takes}
    return found | (set(record.outputs) if last else set())


def _stretches(nodes: Sequence[Node], after: set[int]) -> tuple[Stretch, ...]:
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and groups[-1][0].setting == node.setting:
            groups[-1].append(node)
        else:
            groups.append([node])
    found: list[Stretch] = []
    needed = set(after)
    for group in reversed(groups):
        made = {number for node in group for number in node.gives}
        takes = {number for node in group for number in node.takes}
        leaves = made & needed
        dead: list[tuple[int, ...]] = []
        for node in reversed(group):
            mine = set(node.takes) | set(node.gives)
            dead.append(tuple(sorted(mine - needed)))
            needed |= mine
        needed -= made
        found.append(
            Stretch(
                group[0].setting,
                tuple(group),
                tuple(sorted(takes - made)),
                tuple(sorted(leaves)),
                tuple(dead[::-1]),
            )
        )
    return tuple(reversed(found))
