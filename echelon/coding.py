"""compress=topk:0.01 as a value: the codec's name and its number. Without torch, so that a mistake costs nobody a launch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from echelon.errors import StrategyError

NAMES = ("none", "fp16", "bf16", "int8", "1bit", "topk", "powersgd")


@dataclass(frozen=True)
class Compression:
    """How gradients are coded on their way. `number` is the share kept (topk) or the rank (powersgd), else 0."""

    name: str
    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}:{self.number:g}" if self.number else self.name


DEFAULTS = {"topk": 0.01, "powersgd": 4.0}


def read(text: str) -> Compression | None:
    """The value of the field `compress`; None for "none". Raises StrategyError with the nearest name."""
    name, colon, number = text.partition(":")
    if name not in NAMES:
        alike = {"onebit": "1bit", "1-bit": "1bit", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
        near = alike.get(name) or next(iter(difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)), "")
        hinted = f"Did you mean {near}? " if near else ""
        raise StrategyError(
            f"compress={text} is not known",
            remedy=f"{hinted}Choose from {', '.join(NAMES)}; topk and powersgd take a number: topk:0.01, powersgd:4.",
        )
    if name == "none" and not colon:
        return None
    if name not in DEFAULTS:
        if colon:
            raise StrategyError(f"compress={text}: {name} takes no number", remedy=f"Write compress={name}.")
        return Compression(name)
    return Compression(name, _number(text, name, number) if colon else DEFAULTS[name])


def _number(text: str, name: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise StrategyError(
            f"compress={text}: {number!r} is not a number", remedy="Write topk:0.01 or powersgd:4."
        ) from None
    if name == "topk" and not 0.0 < value <= 0.5:
        raise StrategyError(
            f"compress={text}: the share kept must lie in (0, 0.5]",
            remedy="topk:0.01 sends the largest hundredth of each gradient; above a half nothing is saved.",
        )
    if name == "powersgd" and not (value >= 1 and value == int(value) and value <= 128):
        raise StrategyError(
            f"compress={text}: the rank must be a whole number from 1 to 128",
            remedy="powersgd:4 is a good start; a higher rank sends more and errs less.",
        )
    return value
