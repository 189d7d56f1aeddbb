"""The C allocator that workers and servers start with: tcmalloc where the machine has it, else the C library's, told what to keep.

A training step frees and allocates large tensors all the time. The C library gives them back to the kernel at once, so that each
costs its page faults anew, or keeps them in gaps into which the next ones do not fit.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon import env
from echelon.errors import UsageError

NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
"""The first is the allocator alone; the second has profilers beside it."""

PACKAGE = "libtcmalloc-minimal4 (Debian, Ubuntu) or gperftools-libs (Fedora)"

TCMALLOC = {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 62)}
"""No line on stderr for each tensor above 1 GiB."""

GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Small blocks are kept. Blocks of 4 MiB and more have mappings of their own: what is freed there does not fit the next one, and a
worker grew by half and more (docs/log.md has what was measured)."""


def hint(variables: Mapping[str, str]) -> str:
    """A line for the start of a run whose steps another allocator would make faster; "" where there is nothing to say."""
    if variables != GLIBC:
        return ""
    return f"with tcmalloc, steps that use large tensors are faster: install {PACKAGE}"


def folders() -> list[Path]:
    """Where shared libraries lie on Linux: those of this Python's environment first."""
    triplet = f"{platform.machine()}-linux-gnu"
    system = [Path(root) / sub for root in ("/usr/local/lib", "/usr/lib", "/lib") for sub in (triplet, "")]
    return [Path(sys.prefix) / "lib", *system, Path("/usr/lib64"), Path("/lib64")]


def variables(environment: Mapping[str, str], places: Sequence[Path] | None = None) -> dict[str, str]:
    """Variables that give a worker or server its allocator. {} where the user chose one, or none.

    `places` are the folders that are searched. UsageError when ECHELON_MALLOC names a file that is not there."""
    wanted = env.malloc(environment)
    if wanted == "none" or environment.get("LD_PRELOAD") or sys.platform != "linux":
        return {}
    if wanted != "auto" and not Path(wanted).is_file():
        raise UsageError(
            f"ECHELON_MALLOC={wanted} is not a file",
            remedy="Give the path of an allocator's shared library, auto, or none.",
        )
    library = Path(wanted).absolute() if wanted != "auto" else find(folders() if places is None else places)
    if library is None:
        found = GLIBC
    else:
        found = {"LD_PRELOAD": str(library), **(TCMALLOC if "tcmalloc" in library.name else {})}
    return {name: value for name, value in found.items() if name not in environment}


def find(places: Sequence[Path]) -> Path | None:
    """The first tcmalloc in these folders that this user may read."""
    paths = (place / name for name in NAMES for place in places)
    return next((path for path in paths if os.access(path, os.R_OK)), None)
