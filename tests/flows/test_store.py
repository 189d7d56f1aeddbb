"""torch's process groups stand on the run's coordinator: real processes, gloo, one all-reduce."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.clock import Deadline
from echelon.comm.store import CoordinatorStore
from echelon.errors import PeerLost, WorldError
from tests.flows.live_coordinator import ROOT, RUN, LiveCoordinator, coordinator

RANK = """
import sys
import torch
import torch.distributed as dist
from echelon import env
from echelon.clock import Deadline
from echelon.comm.store import CoordinatorStore
from echelon.control import net
from echelon.control.member import Member

place, token = env.place(), env.take_token()
member = Member.join(place, token, Deadline.after(30))
env.bind_gloo(net.interface_to(net.split(place.coordinator)[0]))
store = CoordinatorStore(member, timeout_s=30)
dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
x = torch.full((4,), float(place.rank + 1))
dist.all_reduce(x)
again = dist.new_group([0, 1])
dist.all_reduce(x, group=again)
dist.barrier()
print("sum", x.tolist(), flush=True)
dist.destroy_process_group()
store.close()
member.call("leave", Deadline.after(5), step=1, code=0)
member.close()
"""


def start_rank(live: LiveCoordinator, rank: int, token_file: Path) -> subprocess.Popen[str]:
    told = {
        "ECHELON_RUN": RUN,
        "ECHELON_RANK": str(rank),
        "ECHELON_WORLD_SIZE": "2",
        "ECHELON_COORDINATOR": live.address,
        "ECHELON_TOKEN_FILE": str(token_file),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.case("init_process_group over our store")
def test_two_processes_form_gloo_groups_over_the_coordinator_and_reduce(tmp_path):
    from echelon.control import token

    with coordinator(tmp_path) as live:
        token.write(tmp_path / "token", live.token)
        ranks = [start_rank(live, rank, tmp_path / "token") for rank in range(2)]
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(10)
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert all("sum [6.0, 6.0, 6.0, 6.0]" in text for text in said), said
        client = live.client(role="cli")
        states = {seat["state"] for seat in client.call("roster", Deadline.after(5)).values()}
        client.close()
        assert states == {"left"}


def test_every_verb_of_a_store_works_through_torch(tmp_path):
    with coordinator(tmp_path, num_workers=1) as live:
        member = live.member()
        store = CoordinatorStore(member, name="a", timeout_s=5)
        through = dist.PrefixStore("p", store)  # this way torch's C++ calls it
        for one in (store, through):
            one.set("k", "v")
            assert one.get("k") == b"v"
            assert one.add("n", 2) == 2
            assert one.add("n", -5) == -3
            assert one.get("n") == b"-3"
            assert one.check(["k", "n"])
            assert not one.check(["k", "nothing"])
            assert one.compare_set("k", "v", "w") == b"w"
            assert one.compare_set("k", "v", "x") == b"w"
            assert one.compare_set("fresh", "", "first") == b"first"
            one.append("list", "ab")
            one.append("list", "cd")
            assert one.get("list") == b"abcd"
            assert one.multi_get(["k", "fresh"]) == [b"w", b"first"]
            one.multi_set(["m1", "m2"], ["1", "2"])
            one.wait(["m1", "m2"], timedelta(seconds=1))
            num_keys = one.num_keys()
            assert one.delete_key("k")
            assert not one.delete_key("k")
            assert one.num_keys() == num_keys - 1
        store.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(WorldError, match="did not come"):
            store.get("never")
        other = CoordinatorStore(member, name="b", timeout_s=5)
        assert not other.check(["n"])  # names do not meet
        store.close()
        other.close()
        member.close()


def test_a_wait_of_one_thread_does_not_hold_up_another(tmp_path):
    with coordinator(tmp_path, num_workers=1) as live:
        member = live.member()
        store = CoordinatorStore(member, timeout_s=20)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(store.get("late")))
        thread.start()
        assert store.add("n", 1) == 1
        store.set("late", "here")
        thread.join(10)
        assert got == [b"here"]
        store.close()
        member.close()


def test_forming_a_group_with_a_dead_rank_fails_at_once_and_names_it(tmp_path):
    with coordinator(tmp_path) as live:
        member, supervisor = live.member(0), live.client(role="supervisor")
        store = CoordinatorStore(member, timeout_s=60)
        dying = threading.Timer(0.3, lambda: supervisor.call("died", Deadline.after(5), rank=1, code=137))
        dying.start()
        began = time.monotonic()
        with pytest.raises(Exception, match="rank 1"):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=60))
        assert time.monotonic() - began < 10
        assert isinstance(store.failure, PeerLost)
        assert store.failure.peers == (1,)
        dying.join()
        store.close()
        supervisor.close()
        member.close()
