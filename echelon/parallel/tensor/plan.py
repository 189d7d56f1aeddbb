"""How the layers of a model are shared by T workers, read from a description of it: pure. Each choice has its reason.

Names and sizes only suggest how layers belong together; what a module's forward does between them is not known here. So a block is a
list of ways to split it, each of which is tried on copies of the module before one is taken (proof.py), and what stands for the
case that none is right: layers that are split by themselves, which needs no proof, or whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from echelon.errors import StrategyError
from echelon.parallel.tensor.blocks import WORTH, alone, alone_reason, blocks_in, divides
from echelon.parallel.tensor.words import Block, Node, Option, Way

KINDS = {
    "column": ("linear",),
    "gather": ("linear",),
    "row": ("linear",),
    "vocab": ("embedding",),
    "whole": ("linear", "embedding", "attention"),
}
"""What may be asked for by name, of which modules."""


def plan(
    nodes: Sequence[Node],
    size: int,
    overrides: str = "",
    padding: bool = False,
    worth: int = WORTH,
    even: bool = False,
) -> tuple[list[Block], dict[str, str]]:
    """(blocks, path -> why a layer that could have been split stays whole). StrategyError where heads do not divide, or an override
    names nothing. With `even`, blocks are split only where every worker gets as much."""
    by_path = {node.path: node for node in nodes}
    asked = _overridden(nodes, overrides)
    taken = set(asked)
    blocks: list[Block] = []
    whole: dict[str, str] = {path: "asked for" for path, how in asked.items() if how == "whole"}
    for node in nodes:
        if how := asked.get(node.path):
            blocks += _as_asked(node, how, size)
        elif node.kind == "attention" and not _touched(node.path, taken):
            if node.refused:
                whole[node.path] = node.refused
                continue
            heads = dict(node.numbers)["num_heads"]
            divides(node.path, heads, size, padding, staged=even)
            way = Way(node.path, "heads", heads, inside=True)
            blocks.append(Block(node.path, (Option((way,)),), f"attention: {heads} heads", known=True))
            taken |= {node.path, f"{node.path}.out_proj"}
        elif node.kind in ("sequential", "layer", "other"):
            found = [
                block
                for block in blocks_in(node, by_path, size, padding, taken, even)
                if not even or all(way.units % size == 0 for option in block.options for way in option.ways)
            ]
            taken |= {path for block in found for path in block.layers}
            blocks += found
    for node in nodes:
        if node.path in taken or node.kind not in ("linear", "embedding"):
            continue
        why = node.refused or ("" if node.rows >= size else f"fewer than {size} rows")
        if not why and node.rows * node.columns < worth:
            why = f"small ({node.rows} × {node.columns}): a message would cost more"
        if why:
            whole[node.path] = why
            continue
        blocks.append(Block(node.path, (), alone_reason(node), alone(node)))
    return _ties(blocks, nodes, asked, whole, worth), whole


def _touched(path: str, taken: set[str]) -> bool:
    return any(other == path or other.startswith(f"{path}.") for other in taken)


def _overridden(nodes: Sequence[Node], text: str) -> dict[str, str]:
    """path -> what was asked for it. Later patterns win."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split("+"))):
        pattern, colon, how = (s.strip() for s in item.rpartition(":"))
        if not colon or how not in KINDS:
            raise StrategyError(
                f"tensor_plan: {item!r} is not PATTERN:column, gather, row, vocab or whole",
                remedy="For example tensor_plan=head:column+blocks.*.mlp.*:whole.",
            )
        fitting = KINDS[how]
        hits = [n.path for n in nodes if n.kind in fitting and fnmatchcase(n.path, pattern)]
        if not hits:
            layers = ", ".join([n.path for n in nodes if n.kind in fitting][:6]) or "none"
            raise StrategyError(
                f"tensor_plan: no {' or '.join(fitting)} module is named {pattern!r}",
                remedy=f"Such modules of this model: {layers}.",
            )
        found |= dict.fromkeys(hits, how)
    return found


def _as_asked(node: Node, how: str, size: int) -> list[Block]:
    if how == "whole":
        return []
    along = node.columns if how == "row" else node.rows
    if node.refused or along < size:
        raise StrategyError(
            f"tensor_plan: {node.path} cannot be split by {how}: {node.refused or f'it has {along}, for {size} workers'}",
            remedy=f"Leave it whole: tensor_plan={node.path}:whole.",
        )
    return [Block(node.path, (), f"{how}, as asked for", (Way(node.path, how, along),))]


def _ties(
    blocks: list[Block], nodes: Sequence[Node], asked: dict[str, str], whole: dict[str, str], worth: int
) -> list[Block]:
    """Modules that share a weight are split alike, by rows (a table and the output layer), or not at all."""
    sharing: dict[int, list[Node]] = {}
    for node in nodes:
        if node.weight:
            sharing.setdefault(node.weight, []).append(node)
    for sharers in sharing.values():
        paths = [n.path for n in sharers]
        theirs = [b for b in blocks if not set(paths).isdisjoint(b.layers)]
        if len(sharers) < 2 or not theirs:
            continue
        blocks = [b for b in blocks if b not in theirs]
        wanted = {asked[path] for path in paths if path in asked}
        if "row" in wanted:
            raise StrategyError(
                f"tensor_plan: {' and '.join(paths)} share one weight, which is split by its rows or not at all",
                remedy=f"Leave them out, or keep them whole: tensor_plan={paths[0]}:whole.",
            )
        splits = all(n.kind in ("linear", "embedding") and not n.refused for n in sharers)
        large = sharers[0].rows * sharers[0].columns >= worth
        if splits and "whole" not in wanted and (large or wanted):
            at_once = {path for path in paths if asked.get(path) == "gather"}
            ways = tuple(
                replace(way, kind="gather") if n.path in at_once else way for n in sharers for way in alone(n)
            )
            blocks.append(Block(paths[0], (), f"one weight of {' and '.join(paths)}, by its rows", ways))
            for path in paths:
                whole.pop(path, None)
            continue
        for path in {path for block in theirs for path in block.layers} - set(asked):
            whole[path] = f"belongs with {' and '.join(paths)}, which share a weight"
    return blocks
