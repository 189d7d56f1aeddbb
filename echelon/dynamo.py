"""torch._dynamo, which takes as long to import as torch itself, comes when somebody needs it and not with the first optimizer.

Every optimizer of torch imports it, for two names that do nothing unless something is being compiled: `disable(function)`
and `graph_break()`. Until then a stand-in answers to these two. Whatever else is asked of it, torch.compile and an
import of a part of it among them, brings the real one, and everything that was disabled meanwhile is disabled there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def postpone() -> None:
    """From now on the import of torch._dynamo gives the stand-in, unless the real one is there already."""
    if NAME not in sys.modules and not any(isinstance(finder, Postponing) for finder in sys.meta_path):
        sys.meta_path.insert(0, Postponing())


class Postponing(MetaPathFinder):
    """Finds the stand-in for torch._dynamo, and the real parts of it."""

    def __init__(self) -> None:
        self.standing_in: StandIn | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        there: ModuleType
        if fullname == NAME and self.standing_in is None:
            real = importlib.machinery.PathFinder.find_spec(fullname, path)
            if real is None or real.loader is None:
                return None
            there = self.standing_in = StandIn(real)
        elif fullname.startswith(f"{NAME}.") and sys.modules.get(NAME) is self.standing_in is not None:
            self.standing_in.real()
            if fullname not in sys.modules:
                return None
            there = sys.modules.pop(fullname)  # what is there when this returns would be executed again
        else:
            return None
        return importlib.machinery.ModuleSpec(fullname, There(there), is_package=True)


class There(Loader):
    """Loads a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # torch's modules of settings take nothing new
            module.__spec__ = self._spec


class StandIn(ModuleType):
    """Answers as torch._dynamo does while nothing is being compiled."""

    def __init__(self, real: importlib.machinery.ModuleSpec) -> None:
        super().__init__(NAME)
        self.__spec__, self.__loader__, self.__package__ = real, real.loader, NAME
        self.__file__ = real.origin
        self.__path__ = list(real.submodule_search_locations or ())
        self._disabled: list[tuple[Any, dict[str, Any]]] = []
        self._real: Any = None

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Marks a function as not to be compiled, as torch's own does."""
        if self._real is not None or fn is None or options.get("wrapping", True):
            return self.real().disable(fn, recursive, **options)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        self._disabled.append((fn, {"recursive": recursive, **options}))
        return call

    def graph_break(self, *args: Any, **options: Any) -> None:
        if self._real is not None:
            self._real.graph_break(*args, **options)

    @property
    def trace_rules(self) -> Any:
        return self._real.trace_rules if self._real is not None else NoRules(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def real(self) -> Any:
        """torch's own module, imported when it is first asked for; from then on it stands in sys.modules."""
        if self._real is None:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                vars(sys.modules["torch"]).pop("_dynamo", None)
            real = importlib.import_module(NAME)
            if not hasattr(real, "disable"):
                return real  # its import is under way
            self._real = real
            for fn, options in self._disabled:
                fn.__dynamo_disable = real.disable(fn, **options)
        return self._real


class NoRules:
    """torch clears the caches of its rules when functions are registered; nothing is cached yet."""

    def __init__(self, module: StandIn) -> None:
        self._module = module

    def clear_lru_cache(self) -> None:
        """There is no cache."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module.real().trace_rules, name)
