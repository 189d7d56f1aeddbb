"""Workers and servers have the allocator that was chosen for them; their script and its subprocesses see the user's environment."""

from __future__ import annotations

import json
import subprocess

import pytest

from echelon.launch import allocator

SCRIPT = """
    import json, os, subprocess, sys
    import torch, echelon
    run = echelon.init()
    model, opt = run.prepare(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    code = "import json, os; print(json.dumps([dict(os.environ), open('/proc/self/maps').read()]))"
    below = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    seen = {"environ": dict(os.environ), "maps": open("/proc/self/maps").read(), "below": below[0], "maps below": below[1]}
    open("seen-%d.json" % run.rank, "w").write(json.dumps(seen))
"""

OTHER = """
#include <stddef.h>
extern void __libc_free(void*);
void free(void* p) { __libc_free(p); }
"""


@pytest.fixture
def library(tmp_path):
    """An allocator: its free is that of the C library."""
    (tmp_path / "other.c").write_text(OTHER)
    path = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, tmp_path / "other.c"], check=True)
    return path


def seen(result, tmp_path):
    assert result.code == 0, result.err
    return [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]


def assert_users_own(environment):
    """Nothing of ours is left in what the script sees."""
    assert not [
        name for name in environment if name.startswith(("LD_PRELOAD", "MALLOC_", "TCMALLOC", "ECHELON_LAID"))
    ]


@pytest.mark.parametrize("start", ["fork", "cold"])
@pytest.mark.needs("gcc")
def test_the_script_and_what_it_starts_see_the_users_environment(echelon_run, tmp_path, library, start):
    result = echelon_run(SCRIPT, env={"ECHELON_MALLOC": str(library), "ECHELON_START": start})
    for one in seen(result, tmp_path):
        assert str(library) in one["maps"]
        assert str(library) not in one["maps below"]
        assert_users_own(one["environ"])
        assert_users_own(one["below"])


def test_without_a_choice_it_is_tcmalloc_or_the_c_librarys_memory_is_kept(echelon_run, tmp_path):
    found = allocator.find(allocator.folders())
    for one in seen(echelon_run(SCRIPT), tmp_path):
        assert ("tcmalloc" in one["maps"]) == (found is not None)
        assert "tcmalloc" not in one["maps below"]
        assert_users_own(one["environ"])


@pytest.mark.needs("gcc")
def test_a_users_own_preload_stays_and_nothing_is_added(echelon_run, tmp_path, library):
    for one in seen(echelon_run(SCRIPT, env={"LD_PRELOAD": str(library)}), tmp_path):
        assert one["environ"]["LD_PRELOAD"] == str(library)
        assert str(library) in one["maps"]
        assert str(library) in one["maps below"]
        assert "tcmalloc" not in one["maps"]


def test_a_path_that_is_not_there_is_refused_before_anything_starts(echelon_run):
    result = echelon_run(SCRIPT, env={"ECHELON_MALLOC": "/nowhere/lib.so"})
    assert result.code == 2
    assert "ECHELON_MALLOC=/nowhere/lib.so is not a file" in result.err


PAGES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
long sysconf(int name) {
    long (*real)(int) = dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? 65536 : real(name);
}
"""

MAPPED = """
    import torch, echelon
    from tests.runs import new_group
    run = echelon.init()
    model = run.prepare(torch.nn.Linear(300, 300))
    model(torch.ones(2, 300)).sum().backward()
    group = new_group(run, "pages")
    buffers = [group.buffer(5000) for _ in range(3)]
    arenas = [line.split() for line in open("/proc/self/maps") if "memfd:echelon" in line]
    assert len(arenas) > 4, open("/proc/self/maps").read()
    assert [line for line in arenas if int(line[2], 16) % 65536] == []
"""


@pytest.mark.needs("gcc")
def test_shared_memory_is_cut_at_the_pages_that_the_kernel_has(echelon_run, tmp_path):
    """A kernel with pages of 64 KiB maps nothing at an offset that is no multiple of them."""
    (tmp_path / "pages.c").write_text(PAGES)
    path = tmp_path / "libpages.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, tmp_path / "pages.c", "-ldl"], check=True)
    result = echelon_run(MAPPED, env={"LD_PRELOAD": str(path)})
    assert result.code == 0, result.err
