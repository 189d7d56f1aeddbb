"""No memory to share: said by the rank that asked, with what to do; and what does not matter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from echelon.errors import WorldError
from tests.conftest import environment
from tests.flows.test_teaching import flat

pytestmark = pytest.mark.needs("core")

LIMITED = """
import os, resource
import torch
import echelon

if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
run = echelon.init()
model = run.prepare(torch.nn.Linear(2000, 2000))
"""


@pytest.mark.case("no memory to share")
@pytest.mark.parametrize(
    ("limit", "what"),
    [
        (1 << 20, "rank 1 cannot share memory with the others of this host: no memory for an arena of"),
        (16 << 20, "rank 1 has no room for 16"),
    ],
    ids=["for an arena", "for gradients"],
)
def test_a_rank_without_memory_says_so_and_what_to_do(echelon_run, limit, what):
    """A limit on the size of files is one on memory files too."""
    result = echelon_run(LIMITED.format(limit=limit))
    assert result.code == WorldError.exit_code
    said = flat(result.err)
    assert what in said
    assert "File too large" in said
    assert "backend=gloo goes without shared memory" in said


@pytest.mark.case("no memory to share")
def test_without_room_for_mappings_nothing_stays_allotted():
    script = """
        import os, resource
        from echelon import native
        from echelon.clock import Deadline
        from echelon.comm import handover
        from echelon.errors import WorldError

        class Nobody:
            def put(self, key, value): pass
            def get(self, key, deadline): raise AssertionError

        def allotted():
            return sum(os.stat(f"/proc/self/fd/{fd}").st_blocks for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

        def enter():
            return handover.enter(native.core(), Nobody(), handover.Seat(0, 1, "token", "test"), "g", Deadline.after(30))

        group, before = enter(), len(os.listdir("/proc/self/fd"))
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        try:
            enter()
        except WorldError as error:
            assert "cannot map" in str(error) and "Cannot allocate memory" in str(error), error
            assert "Free memory" in error.remedy
        else:
            raise AssertionError("it was made")
        assert len(os.listdir("/proc/self/fd")) == before
        blocks = allotted()
        try:
            group.buffer(64 << 20)
        except OSError as error:
            assert "cannot map" in str(error), error
        else:
            raise AssertionError("it was given")
        assert allotted() == blocks
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert group.buffer(64 << 20).sum() == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, 100))
        try:
            enter()
        except WorldError as error:
            assert "Too many open files" in str(error) and "open files" in error.remedy, error
        else:
            raise AssertionError("it was made")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.case("no memory to share")
@pytest.mark.needs("disk")
def test_a_tiny_and_full_dev_shm_does_not_matter(tmp_path):
    (tmp_path / "train.py").write_text(
        "import echelon, torch\nfrom tests.runs import group_of\n"
        "assert torch.zeros(1).numel() and __import__('os').statvfs('/dev/shm').f_bavail == 0\n"
        "run = echelon.init()\n"
        "model = run.prepare(torch.nn.Linear(500, 500))\n"
        "model(torch.ones(2, 500)).sum().backward()\n"
        "print('backend', type(group_of(run).inner).__name__)\n"
    )
    small = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec \"$@\""  # fmt: skip
    command = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-m", "echelon", "run", "--workers", "2", "train.py"]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "backend NativeGroup" in done.stdout
