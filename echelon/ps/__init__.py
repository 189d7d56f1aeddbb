"""The parameter server: who holds what (keys), how updates meet (policy and its kinds), what makes a step whole (versions).

`echelon.ps.connect` is the direct API: named tables on servers, without a trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.ps.client import Client, Work, connect

__all__ = ["Client", "Work", "connect"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("echelon.ps.client"), name)
    raise AttributeError(f"module 'echelon.ps' has no attribute {name!r}")
