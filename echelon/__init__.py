"""Echelon: train a PyTorch script on any number of workers, with the answer that one machine would give.

    run = echelon.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)

Names are loaded when they are first used, so that `import echelon` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon import errors, faults, ps
    from echelon.data.columns import Columns
    from echelon.run import Run
    from echelon.start import init
    from echelon.strategy import Strategy

__version__ = "0.1.0"

_HOMES = {
    "Columns": "echelon.data.columns",
    "Run": "echelon.run",
    "Strategy": "echelon.strategy",
    "init": "echelon.start",
}

__all__ = ["Columns", "Run", "Strategy", "__version__", "errors", "faults", "init", "ps"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("errors", "faults", "ps"):
        return importlib.import_module(f"echelon.{name}")
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
