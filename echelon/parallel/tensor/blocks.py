"""Which layers of a module belong together, by their names, sizes and order: pure. What is found here is a suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.errors import StrategyError
from echelon.parallel.tensor import names
from echelon.parallel.tensor.words import Block, Node, Option, Way

WORTH = 1 << 16
"""A layer with fewer elements than this is split only inside a block: its message would cost more than it saves."""


def divides(
    path: str, heads: int, size: int, padding: bool, what: str = "heads", staged: bool = False
) -> None:
    """Heads are work: ranks with one more make the others wait. `staged`: a pipeline may cut inside, and padding is of no use."""
    if heads % size == 0 or (padding and heads >= size):
        return
    fitting = [str(n) for n in range(2, heads + 1) if heads % n == 0]
    choose = (
        f"Use tensor={', '.join(fitting[:-1])}{' or ' if fitting[:-1] else ''}{fitting[-1]}"
        if fitting
        else ""
    )
    uneven = (
        ", or let some workers have one more with --set tensor_padding=true"
        if heads > size and not staged
        else ""
    )
    off = ", and under pipeline heads are not dealt unevenly" if staged else ", and padding is off"
    whole = f"{choose}{uneven}, or keep it whole" if choose else "Keep it whole"
    raise StrategyError(
        f"tensor={size} cannot split `{path}` ({heads} {what})\n"
        f"  {size} does not divide {heads}{off if heads > size else ''}.",
        remedy=f"{whole} with --set tensor_plan='{path}*:whole'.",
    )


def blocks_in(
    node: Node, by_path: dict[str, Node], size: int, padding: bool, taken: set[str], staged: bool = False
) -> list[Block]:
    """Blocks made of a module's children, or of theirs."""
    at = f"{node.path}." if node.path else ""
    children = [n for n in by_path.values() if n.parent == node.path and n.path]
    below = {
        n.path.removeprefix(at): n for n in by_path.values() if n.path.startswith(at) and n.path not in taken
    }
    linears = {
        name: n for name, n in below.items() if n.kind == "linear" and name.count(".") < 2 and not n.refused
    }
    if node.kind == "sequential":
        return _chains(node, children, taken, size) + _convolutions(node, children, taken, size)
    found = _convolutions(node, children, taken, size)
    used: set[str] = set()
    for pattern in names.ATTENTION:
        if (hit := names.match(pattern, linears)) and not used & set(hit.all):
            block = _attention(node, by_path, hit, linears, size, padding, staged)
            if block is not None:
                found.append(block)
                used |= set(hit.all)
    for pattern in names.MLP:
        if (hit := names.match(pattern, linears)) and not used & set(hit.all):
            last = linears[hit.last]
            for packed in (1, 2):
                if all(linears[n].rows == packed * last.columns for n in hit.first) and last.columns >= size:
                    ways = [Way(at + n, "column", last.columns, packed, inside=True) for n in hit.first]
                    ways.append(Way(at + hit.last, "row", last.columns, inside=True))
                    reason = f"{' and '.join(hit.first)} by columns, {hit.last} by rows"
                    known = node.kind == "layer" and packed == 1
                    alone = _lone(linears, hit.all)
                    found.append(Block(node.path, (Option(tuple(ways)),), reason, alone, known=known))
                    used |= set(hit.all)
                    break
    return found


def _attention(
    node: Node,
    by_path: dict[str, Node],
    hit: names.Hit,
    linears: dict[str, Node],
    size: int,
    padding: bool,
    staged: bool,
) -> Block | None:
    """Attention whose heads, or whose heads' size, are a number of the module that has the projections."""
    out, at = linears[hit.last], f"{node.path}." if node.path else ""
    inner = f"{hit.first[0].rpartition('.')[0]}.".removeprefix(".")
    numbers = dict(by_path[(at + inner).removesuffix(".")].numbers)
    heads = max((numbers[n] for n in names.HEADS if n in numbers), default=0)
    if not heads:
        width = next((numbers[n] for n in names.HEAD_SIZES if n in numbers), 0)
        heads = out.columns // width if width > 0 and out.columns % width == 0 else 0
    if not heads or out.columns % heads:
        return None
    packed = 3 if len(hit.first) == 1 else 1
    each = out.columns // heads
    units = min(linears[n].rows // (packed * each) for n in hit.first)
    if units < 1 or heads % units or any(linears[n].rows % (packed * units) for n in hit.first):
        return None
    if units < min(heads, size):  # keys and values of one head, say: nobody can have a part of them
        return None
    what = "heads" if units == heads else "heads of keys and values"
    divides(node.path, units, size, padding, what, staged)
    counted = [inner + n for n in (*names.HEADS, *names.KEY_HEADS) if n in numbers]
    widths = [inner + n for n in names.WIDTHS if numbers.get(n) == out.columns]
    columns = tuple(Way(at + n, "column", units, packed, inside=True) for n in hit.first)
    row = Way(at + hit.last, "row", units, inside=True)
    whole_units = tuple(replace(way, packed=1) for way in columns)
    layouts = [columns] if packed == 1 else [columns, whole_units]
    options = [
        Option((*layout, row), tuple(chosen))
        for layout in layouts
        for chosen in ([*counted, *widths], counted, [])  # the last: code that counts heads from the tensors
    ]
    reason = f"attention: {heads} heads" + (f", {units} of keys and values" if units < heads else "")
    return Block(node.path, tuple(dict.fromkeys(options)), reason, _lone(linears, hit.all))


def _chains(node: Node, children: list[Node], taken: set[str], size: int) -> list[Block]:
    """Linear, element-wise modules, Linear in a Sequential."""
    found: list[Block] = []
    first: int | None = None
    for i, child in enumerate(children):
        if child.kind == "linear" and child.path not in taken and not child.refused:
            if first is None or children[first].rows != child.columns or child.columns < size:
                first = i
                continue
            start, units = children[first], child.columns
            ways = (Way(start.path, "column", units, inside=True), Way(child.path, "row", units, inside=True))
            span = tuple(c.name for c in children[first : i + 1])
            reason = f"{start.name} by columns, {child.name} by rows"
            alone = _lone({c.name: c for c in (start, child)}, (start.name, child.name))
            found.append(Block(node.path, (Option(ways),), reason, alone, span))
            first = None
        elif child.kind != "elementwise":
            first = None
    return found


def _convolutions(node: Node, children: list[Node], taken: set[str], size: int) -> list[Block]:
    """Convolution, BatchNorm, what works channel by channel, convolution: in the order in which the module holds them."""
    found: list[Block] = []
    first: int | None = None
    for i, child in enumerate(children):
        free = child.path not in taken and not child.refused
        if child.kind == "convolution" and free:
            if first is None or children[first].rows != child.columns or child.columns < size:
                first = i
                continue
            start, units = children[first], child.columns
            norms = [c for c in children[first:i] if c.kind == "norm"]
            ways = [Way(start.path, "channels out", units, inside=True)]
            ways += [Way(c.path, "channels", units, inside=True) for c in norms]
            ways.append(Way(child.path, "channels in", units, inside=True))
            span = tuple(c.name for c in children[first : i + 1]) if node.kind == "sequential" else ()
            reason = f"{start.name} by output channels, {child.name} by input channels"
            found.append(Block(node.path, (Option(tuple(ways)),), reason, (), span))
            first = None
        elif child.kind == "norm":
            first = first if first is not None and free and child.rows == children[first].rows else None
        elif child.kind not in ("elementwise", "channelwise"):
            first = None
    return found


def _lone(linears: dict[str, Node], which: Sequence[str]) -> tuple[Way, ...]:
    return tuple(
        way for n in which for way in alone(linears[n]) if linears[n].rows * linears[n].columns >= WORTH
    )


def alone(node: Node) -> tuple[Way, ...]:
    return (Way(node.path, "vocab" if node.kind == "embedding" else "column", node.rows),)


def alone_reason(node: Node) -> str:
    if node.kind == "embedding":
        return f"{node.rows} entries dealt by rows, looked up where they are, added"
    return "alone: by columns, its output is gathered"
