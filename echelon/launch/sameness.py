"""Do two hosts run the same script? Compared by what is in the file, not by its name."""

from __future__ import annotations

import hashlib
import importlib.machinery
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from echelon.launch.local import Job


def file_of(job: Job, folder: Path) -> Path | None:
    """The file that is run as __main__, seen from `folder`; None when it is not there. Nothing is imported."""
    if job.module:
        return _module_file(job.script, [str(folder), *sys.path])
    path = folder / job.script
    path = path / "__main__.py" if path.is_dir() else path
    return path if path.is_file() else None


def sha256(path: Path | None) -> str:
    """The file's digest in hexadecimal; "" when there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else ""
    except OSError:
        return ""


def version() -> str:
    """The installed version, "" for a clone that is not installed."""
    try:
        return metadata.version("echelon-train")
    except metadata.PackageNotFoundError:
        return ""


def objection(description: dict[str, Any], there: dict[Path, str], host: str) -> str:
    """Why this host cannot run what the first one runs; "" when one of `there` (folder -> digest) is the same. Pure."""
    first, wanted, script = description["host"], description["script_sha256"], description["script"]
    if wanted in there.values():
        return ""
    found = {folder: digest for folder, digest in there.items() if digest}
    if not found:
        places = " or ".join(str(folder) for folder in there)
        return f"{script} is not on {host} in {places}"
    folder, digest = next(iter(found.items()))
    return f"{script} on {host} in {folder} has sha256 {digest[:16]}…, on {first} it has {wanted[:16]}…: not the same script"


def _module_file(name: str, path: list[str]) -> Path | None:
    """Where `python -m name` would find its code, without running the packages around it."""
    parts, spec = name.split("."), None
    where: list[str] | None = path
    for i in range(len(parts)):
        if where is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), where)
        if spec is None:
            return None
        where = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    if where is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", where)
    return Path(spec.origin) if spec is not None and spec.origin else None
