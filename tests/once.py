"""What several tests need and one of them makes: once for all test processes of a run.

    once(name, make) -> folder        `make(folder)` fills it; whoever asks next, in whichever process, gets the same folder

One that raised is made anew by the next who asks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

Once: TypeAlias = Callable[[str, Callable[[Path], None]], Path]

COMPLETE = ".complete"


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / hashlib.sha256(name.encode()).hexdigest()[:16]
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / COMPLETE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / COMPLETE).touch()
        return folder

    return get
