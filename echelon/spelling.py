"""Fields of a strategy as text: read, written, and what is said about those that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from echelon.errors import StrategyError


def from_text(key: str, text: str, hint: Any) -> Any:
    if hint is bool:
        known = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        if text.lower() in known:
            return known[text.lower()]
        raise StrategyError(f"{key}={text} is neither true nor false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise StrategyError(f"{key}={text} is not {kind}") from None
    return text


def unknown(key: str, known: Iterable[str], what: str) -> StrategyError:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.4)
    remedy = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
    return StrategyError(f"unknown {what} {key!r}", remedy=remedy)


def need(ok: bool, message: str, remedy: str = "") -> None:
    if not ok:
        raise StrategyError(message, remedy=remedy)


def spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
