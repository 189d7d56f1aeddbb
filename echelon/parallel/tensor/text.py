"""A plan as lines for people: what is split and how, what is whole and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.parallel.tensor.pieces import dealt
from echelon.parallel.tensor.words import Block, Option

WAYS = {"column": "output features", "row": "input features", "vocab": "entries", "heads": "heads"}
WAYS |= {"gather": "output features, gathered at once"}
WAYS |= {"channels out": "output channels", "channels in": "input channels", "channels": "channels"}


def lines(chosen: Sequence[tuple[Block, Option | None]], whole: Mapping[str, str], size: int) -> list[str]:
    """One block after the other, in the order of the plan."""
    said: list[str] = []
    for block, option in chosen:
        name = block.path or "the model"
        if option is None:
            said.append(f"{name}: whole; {block.reason} did not give the same answer when it was tried")
            continue
        lone = option.ways == block.alone
        reason = "each layer by itself, its output is gathered" if lone and block.options else block.reason
        said.append(f"{name}: {reason}")
        for way in option.ways:
            shares = sorted(
                {last - first for first, last in (dealt(way.units, size, r) for r in range(size))}
            )
            each = " or ".join(str(n) for n in shares)
            said.append(f"  {way.path}: {WAYS[way.kind]}, {each} of {way.units} a worker")
    said += [f"{path or 'the model'}: whole; {why}" for path, why in whole.items()]
    return said


def summary(chosen: Sequence[tuple[Block, Option | None]], elements: int, here: int, size: int) -> str:
    """`tensor=2: 8 layers split, 52 % of the parameters on each worker`"""
    layers = sum(len(option.ways) for _, option in chosen if option is not None)
    share = here / max(1, elements)
    return f"tensor={size}: {layers} layer{'s' * (layers != 1)} split, {share:.0%} of the parameters on each worker"
