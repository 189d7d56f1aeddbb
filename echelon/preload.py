"""What a fork server imports once for all roles, and what each role must set right because torch and numpy were there before it.

torch and numpy read some environment variables only when they are imported. A role's own values of thread counts are
applied by call. Scripts set such variables above their `import torch`: they find torch not yet imported, as in plain
Python, and what can be applied is applied at that import. What cannot is named with the remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import random
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from echelon import dynamo, env
from echelon.strategy import Strategy

READ_AT_IMPORT = re.compile(
    r"""(OMP|GOMP|KMP|MKL|MKLDNN|DNNL|ONEDNN|OPENBLAS|GOTO|NPY|NUMPY|KINETO|PYTORCH_JIT|TORCHDYNAMO_EXTENDED
    |TORCHDYNAMO_TRANSLATION|TORCH_COMPILE|TORCH_BLAS_PREFER|TORCH_LINALG_PREFER)_\w+
    |TORCH_(LOGS\w*|TRACE|DTRACE|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|DEVICE_BACKEND_AUTOLOAD|USE_RTLD_GLOBAL
    |CUDA_SANITIZER|CUDAGRAPH_GC|FAKE_TENSOR_DEBUG|CUSTOM_TERMINATE|ALLOW_TF32_CUBLAS_OVERRIDE|DISTRIBUTED_DEBUG)""",
    re.VERBOSE,
)
"""Variables that torch 2.13 and numpy 2 read while they are imported, found by recording their calls of getenv."""

TORCH_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OPENBLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

WATCHED = ("torch", "numpy")

EVERY_FORM: tuple[str, ...] = (
    "torch",
    "numpy",
    "encodings.idna",
    "echelon.start",
    "echelon.ps.duty",
    "echelon.torch_backend",
)
TRACED = ("torch._dynamo", "torch._subclasses.fake_tensor")
"""torch's fake tensors import torch._dynamo: models that are traced or split by fully_shard have some."""


def imports(strategy: Strategy) -> tuple[str, ...]:
    """What the workers and servers of such a run import before their first step; () when each is to do so for itself."""
    if env.cold_start():
        return ()
    found = EVERY_FORM
    if strategy.form == "sharded":
        found += (*TRACED, "torch.distributed.fsdp", "torch.distributed.tensor")
    if strategy.pipeline != "1":
        found += TRACED
    return found


def load(names: Sequence[str]) -> str:
    """Imports all that roles need; "" or why it must not be forked."""
    if dynamo.NAME not in names:
        dynamo.postpone()
    for name in names:
        importlib.import_module(name)
    return "a sitecustomize or .pth file has initialised CUDA" if _cuda_is_in_use() else ""


def _cuda_is_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def in_role(before: Mapping[str, str]) -> None:
    """Makes this fork what it would be if it had imported everything itself; `before` is the fork server's environment."""
    # otherwise every fork would draw the same
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    follow(before, env.everything())
    sys.meta_path.insert(0, Watching(env.everything()))


def follow(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Applies thread counts that changed; the names of other variables that changed and were read too early."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    threads = _count(now, TORCH_THREADS)
    if threads and "torch" in sys.modules and any(name in changed for name in TORCH_THREADS):
        sys.modules["torch"].set_num_threads(threads)
    threads = _count(now, OPENBLAS_THREADS)
    if threads and any(name in changed for name in OPENBLAS_THREADS):
        set_openblas_threads(threads)
    applied = {*TORCH_THREADS, *OPENBLAS_THREADS}
    return sorted(name for name in changed if READ_AT_IMPORT.fullmatch(name) and name not in applied)


def _count(variables: Mapping[str, str], names: Sequence[str]) -> int:
    """The first of these variables that holds a number; 0 when none does."""
    return next((int(variables[name]) for name in names if variables.get(name, "").isdecimal()), 0)


def set_openblas_threads(count: int) -> None:
    """In every OpenBLAS that is loaded: numpy and scipy each bring one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[5] for line in lines if "openblas" in line and "/" in line}:
            library = ctypes.CDLL(path)
            for name in (
                f"{first}openblas_set_num_threads{last}" for first in ("", "scipy_") for last in ("", "64_")
            ):
                if hasattr(library, name):
                    getattr(library, name)(count)


class Watching(MetaPathFinder):
    """Notices the script's own first import of torch or numpy, which are kept aside until then.

    Modules of ours hold them already; only a new `import torch` comes here. What a script set in the environment
    above that line takes effect now, as it would in plain Python.
    """

    def __init__(self, before: Mapping[str, str]) -> None:
        self._before = dict(before)
        self._aside: dict[str, ModuleType] = {}
        for name in [name for name in sys.modules if name.partition(".")[0] in WATCHED]:
            self._aside[name] = sys.modules.pop(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._aside:
            return None
        self.end()
        there = sys.modules.pop(fullname)  # what is there when this returns would be executed again
        return importlib.machinery.ModuleSpec(
            fullname, dynamo.There(there), is_package=hasattr(there, "__path__")
        )

    def end(self) -> None:
        """Puts the modules back, applies what the script has set, and names what comes too late."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        sys.modules.update(self._aside)
        late = follow(self._before, env.everything())
        if late:
            print(
                f"echelon: {', '.join(late)} set by the script before `import torch`: workers are forked from a process that has"
                " imported torch, so it has no effect. Set it in the shell, or start with ECHELON_START=cold.",
                file=sys.stderr,
                flush=True,
            )


def settle() -> None:
    """echelon.init: from here on what the script sets is no longer watched."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Watching)]:
        finder.end()
