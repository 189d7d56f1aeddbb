"""The compiled core, if it is there. Everything works without it, more slowly."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

from echelon import env


@functools.cache
def core() -> ModuleType | None:
    """The compiled module, or None when it was not built or ECHELON_NATIVE=0 asks for the plain path."""
    if not env.native():
        return None
    try:
        return importlib.import_module("echelon.native._core")
    except ImportError as error:
        print(
            f"echelon: the compiled core is not there ({error}); collectives run over gloo, several times slower. "
            "`pip install .` builds it, `make native` in a clone; ECHELON_NATIVE=0 goes without it quietly.",
            file=sys.stderr,
        )
        return None
