"""Which modules are gathered and freed together (units): pure.

A unit is one message when its parameters are gathered, and what lies whole on a rank at a time. Large ones cost memory, small
ones messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LISTED = 8
"""Members of a long list are units from 1/8 of the wanted size on: a list cannot be one itself, and all of it would lie in the outermost."""


@dataclass(frozen=True)
class Node:
    """A module of a model. A module that two others hold is there twice, with the bytes at the first place."""

    name: str
    num_bytes: int = 0
    """Of parameters that it holds itself and no earlier module held."""
    children: tuple[Node, ...] = ()
    runs: bool = True
    """It has a forward of its own: False for lists and dicts of modules."""
    lists: bool = False
    """Its members run one after the other."""
    opaque: bool = False
    """It reads its children's parameters without calling them (torch's attention): they cannot be freed by themselves."""
    ties: tuple[int, ...] = ()
    """Parameters that it holds and that are held at some other place too, by number."""


def units(root: Node, unit_bytes: int) -> dict[str, int]:
    """Names of the modules that become units, inner ones first and the root last, with the bytes that each gathers.

    Parameters that are tied to others outside a module stay with the innermost one that holds all of them.
    """
    places: dict[int, int] = {}
    for node in walk(root):
        for tie in node.ties:
            places[tie] = places.get(tie, 0) + 1
    found: dict[str, int] = {}

    def visit(node: Node, enough: float) -> int:
        """Chooses below `node`; gives the bytes that are in no unit yet. `node` is one from `enough` bytes on."""
        whole = sum(n.num_bytes for n in walk(node))
        if node.opaque:
            rest = whole
        else:
            each = unit_bytes / LISTED if node.lists and whole >= unit_bytes else unit_bytes
            rest = node.num_bytes + sum(visit(child, each) for child in node.children)
        if node is root or not node.runs or not rest or rest < enough or not _closed(node, places):
            return rest
        found.setdefault(node.name, rest)
        return 0

    rest = visit(root, unit_bytes)
    return found | {root.name: rest}


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from walk(child)


def _closed(node: Node, places: dict[int, int]) -> bool:
    """No parameter below is held outside as well."""
    here: dict[int, int] = {}
    for below in walk(node):
        for tie in below.ties:
            here[tie] = here.get(tie, 0) + 1
    return all(count == places[tie] for tie, count in here.items())
