"""Which C allocator workers start with, and what this process's own one tells."""

from __future__ import annotations

import subprocess
import sys

import pytest

from echelon import env
from echelon.errors import UsageError
from echelon.launch import allocator


@pytest.fixture
def library(tmp_path):
    file = tmp_path / "lib" / "libtcmalloc_minimal.so.4"
    file.parent.mkdir()
    file.write_bytes(b"")
    return file


def test_tcmalloc_is_preloaded_where_the_machine_has_it(library):
    found = allocator.variables({}, [library.parent])
    assert found == {"LD_PRELOAD": str(library), **allocator.TCMALLOC}


def test_without_it_the_c_library_keeps_what_it_has(tmp_path):
    assert allocator.variables({}, [tmp_path]) == allocator.GLIBC


def test_what_the_user_set_stays(library, tmp_path):
    assert allocator.variables({"LD_PRELOAD": "mine.so"}, [library.parent]) == {}
    assert allocator.variables({"ECHELON_MALLOC": "none"}, [library.parent]) == {}
    name = next(iter(allocator.GLIBC))
    assert name not in allocator.variables({name: "1"}, [tmp_path])


def test_a_path_is_taken_and_one_that_is_not_there_is_refused(library, tmp_path):
    other = tmp_path / "libother.so"
    other.write_bytes(b"")
    assert allocator.variables({"ECHELON_MALLOC": str(other)}, [library.parent]) == {"LD_PRELOAD": str(other)}
    with pytest.raises(UsageError, match="is not a file"):
        allocator.variables({"ECHELON_MALLOC": str(tmp_path / "nothing.so")}, [library.parent])


def test_what_is_laid_is_taken_back(monkeypatch):
    laid = env.laid({"LD_PRELOAD": "x.so", "MALLOC_TRIM_THRESHOLD_": "1"})
    for name, value in laid.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STAYS", "1")
    before = env.everything()
    env.take_back()
    assert env.everything() == {name: value for name, value in before.items() if name not in laid}
    assert env.laid({}) == {}


FREE = """
import ctypes, torch
from echelon.mesh import allocator, limits
kept = [torch.ones(1 << 18) for _ in range(256)]
hold, kept = kept[-1:], None
free, held = allocator.free_bytes(), limits.held()
allocator.release()
print(allocator.is_tcmalloc(), free >> 20, (held - limits.held()) >> 20, allocator.give_back_at_once())
block = torch.ones(128 << 20)  # more than was free before
held = limits.held()
del block
print((held - limits.held()) >> 20)
"""


@pytest.mark.parametrize("which", ["glibc", pytest.param("tcmalloc", marks=pytest.mark.needs("tcmalloc"))])
def test_memory_that_is_free_is_told_and_given_back(which):
    library = allocator.find(allocator.folders())
    laid = {"LD_PRELOAD": str(library)} if which == "tcmalloc" else allocator.GLIBC
    environment = {k: v for k, v in env.everything().items() if k != "LD_PRELOAD"} | laid
    done = subprocess.run(
        [sys.executable, "-c", FREE], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    known, free, given, can, at_once = done.stdout.split()
    assert known == str(which == "tcmalloc")
    assert int(free) >= 200
    assert int(given) >= 200
    assert can == "True"
    assert int(at_once) >= 500
