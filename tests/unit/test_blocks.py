"""Memory of torch's large tensors: used again, never much more than was in use, and everybody's own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest
import torch

from echelon import native
from echelon.mesh import limits
from echelon.native import blocks

pytestmark = pytest.mark.skipif(native.core() is None, reason="the compiled core is not built")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def in_use():
    assert blocks.use()
    blocks.settle()


def filled(mib: float, value: float = 1.0) -> torch.Tensor:
    return torch.full((int(mib * MIB) // 4,), value)


def test_the_next_tensor_lies_where_the_last_one_was():
    used = blocks.sizes().used
    for _ in range(3):
        tensor = filled(8)
        assert blocks.sizes().used - used in range(8 * MIB, 8 * MIB + 2 * 4096)
        fresh = blocks.sizes().fresh
        del tensor
        again = filled(7)
        assert blocks.sizes().fresh == fresh
        del again
    assert blocks.sizes().used == used


def test_small_tensors_and_those_of_before_are_none_of_ours():
    used = blocks.sizes().used
    small = filled(0.25)
    assert blocks.sizes().used == used
    assert small.sum() == small.numel()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_never_much_more_than_was_in_use(seed):
    draw, mine = random.Random(seed), []
    for _ in range(300):
        if draw.random() < 0.5 and len(mine) < 12:
            value = float(draw.randrange(1000))
            mine.append((filled(draw.choice([0.5, 1, 1.3, 2, 4, 9]) + draw.random(), value), value))
        elif mine:
            tensor, value = mine.pop(draw.randrange(len(mine)))
            assert bool((tensor == value).all())
        sizes = blocks.sizes()
        assert sizes.used <= sizes.resident <= sizes.most_used * 17 // 16
    assert all(bool((tensor == value).all()) for tensor, value in mine)


def test_what_is_settled_goes_back_to_the_system():
    tensors = [filled(16) for _ in range(8)]
    held = limits.held()
    del tensors
    assert limits.held() > held - 16 * MIB  # kept for the next ones
    blocks.settle()
    assert limits.held() < held - 100 * MIB


def test_threads_have_memory_of_their_own():
    wrong = []

    def work(number):
        for turn in range(60):
            tensor = filled(1 + turn % 3, number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_goes_on_with_its_own_copy():
    mine, stop = filled(4, 7), threading.Event()
    busy = threading.Thread(target=lambda: [filled(1) for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                # as DataLoader's processes do: a team of OpenMP does not outlive a fork
                torch.set_num_threads(1)
                theirs = filled(4, 3)
                right = bool((mine == 7).all()) and bool((theirs == 3).all())
                mine.fill_(0)
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert bool((mine == 7).all())
    finally:
        stop.set()
        busy.join()


def test_where_addresses_are_limited_all_is_as_it_was():
    told = (
        "import resource, torch; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36));"
        "from echelon.native import blocks; assert not blocks.use(); assert blocks.sizes() == (0, 0, 0, 0);"
        "blocks.settle(); blocks.tighten(); blocks.age(); assert torch.ones(1 << 20).sum() == 1 << 20"
    )
    subprocess.run([sys.executable, "-c", told], check=True, timeout=60)


def test_another_allocator_is_left_alone(tmp_path):
    source = tmp_path / "other.c"
    source.write_text(
        "#include <stddef.h>\nextern void __libc_free(void*);\nvoid free(void* p) { __libc_free(p); }\n"
    )
    library = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    told = "import torch; from echelon.native import blocks; assert not blocks.use(); torch.ones(1 << 20)"
    env = {**os.environ, "LD_PRELOAD": str(library)}
    subprocess.run([sys.executable, "-c", told], check=True, timeout=60, env=env)
