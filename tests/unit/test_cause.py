"""Why a signal may have come: from the kernel's counters to a sentence."""

from __future__ import annotations

import signal

import pytest

from echelon.launch.cause import Memory, likely_cause, read, size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("number", "after", "words"),
    [
        (signal.SIGKILL, Memory(oom_kills=1, limit_bytes=2 * GIB), "its control group ran out of memory (limit 2.0 GiB)"),
        (signal.SIGKILL, Memory(machine_oom_kills=4), "the machine ran out of memory"),
        (signal.SIGKILL, Memory(machine_oom_kills=3), "Somebody sent it SIGKILL"),
        (signal.SIGBUS, Memory(shm_free_bytes=4096, shm_total_bytes=64 << 20), "/dev/shm has 4.0 KiB free of 64.0 MiB"),
        (signal.SIGBUS, Memory(), "often a full /dev/shm"),
        (signal.SIGSEGV, Memory(), "Native code crashed"),
        (signal.SIGABRT, Memory(), "abort"),
        (signal.SIGTERM, Memory(), "asked it to stop"),
    ],
)  # fmt: skip
def test_a_signal_gets_its_likely_cause(number, after, words):
    assert words in likely_cause(number, Memory(machine_oom_kills=3), after, 3 * GIB)


def test_the_memory_peak_is_told_with_a_kill():
    assert "peaked at 1.5 GiB" in likely_cause(signal.SIGKILL, Memory(), Memory(oom_kills=1), 3 * GIB // 2)


def test_counters_of_control_groups_of_both_versions(tmp_path):
    v1 = tmp_path / "memory" / "job"
    v1.mkdir(parents=True)
    (v1 / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (v1 / "memory.limit_in_bytes").write_text("1073741824\n")
    (tmp_path / "vmstat").write_text("nr_free 1\noom_kill 5\n")
    found = read("4:memory:/job\n3:cpu,cpuacct:/\n", root=tmp_path, proc=tmp_path)
    assert (found.oom_kills, found.limit_bytes, found.machine_oom_kills) == (2, GIB, 5)

    v2 = tmp_path / "user.slice"
    v2.mkdir()
    (v2 / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 3\n")
    (v2 / "memory.max").write_text("max\n")
    found = read("0::/user.slice\n", root=tmp_path, proc=tmp_path)
    assert (found.oom_kills, found.limit_bytes) == (3, None)


def test_inside_a_container_the_group_is_mounted_at_the_root(tmp_path):
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    (tmp_path / "memory.max").write_text("2147483648\n")
    assert read("0::/docker/abc\n", root=tmp_path, proc=tmp_path).oom_kills == 1


def test_nothing_to_read_is_nothing_found(tmp_path):
    assert read("", root=tmp_path, proc=tmp_path).oom_kills == 0
    assert read("garbage\n\n::", root=tmp_path, proc=tmp_path).oom_kills == 0


def test_sizes_as_people_say_them():
    assert [size(n) for n in (12, 2048, 300 << 20, 3 * GIB // 2)] == [
        "12 bytes",
        "2.0 KiB",
        "300 MiB",
        "1.5 GiB",
    ]
