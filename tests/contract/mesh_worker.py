"""One rank of a group among hosts: RANK SIZE FOLDER ADDRESS HOST WHAT…; the ranks meet in a file of FOLDER.

HOST is the host that the rank says to be on: ranks with one HOST share memory."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from echelon import native
from echelon.clock import Deadline
from echelon.comm import hosts
from echelon.comm.group import Lost
from echelon.comm.handover import Seat, StoreMeeting
from echelon.comm.over_native import NativeGroup
from tests.contract.group_contract import CHECKS, met

rank, size, folder, address, host, *what = sys.argv[1:]
rank, size, folder = int(rank), int(size), Path(folder)
core = native.core()
meeting = StoreMeeting(dist.FileStore(str(folder / "meeting"), size))
seat = Seat(rank, size, "token of this test", "test")


def group(name: str = "group", limit_s: float = 3.0) -> NativeGroup:
    made = hosts.enter(core, meeting, seat, name, address, Deadline.after(60), where=host, limit_s=limit_s)
    return NativeGroup(made, rank, size, torch.device("cpu"), name)


def check() -> None:
    g = group()
    for one in CHECKS:
        one(g)
    g.close()


def lost(outcome) -> None:
    assert isinstance(outcome, Lost), outcome
    (folder / f"lost-{rank}").write_text(f"{outcome.peers} {time.monotonic()} {outcome.reason}")


def die() -> None:
    """The last rank dies in the middle of an operation."""
    g = group()
    met(g.barrier())
    x = torch.ones(8 << 20)
    work = g.all_reduce(x)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost(work.wait(Deadline.after(30)))
    lost(g.barrier().wait(Deadline.after(1)))


if __name__ == "__main__":
    globals()[what[0]](*what[1:])
    (folder / f"met-{rank}").touch()
