"""One rank of a group among hosts: work(rank, size, folder, address, host, what, …); the ranks meet in a file of the folder.

`host` is the host that the rank says to be on: ranks with one host share memory. A process is one rank."""

import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from echelon import native
from echelon.clock import Deadline
from echelon.comm import hosts
from echelon.comm.group import Lost, merge
from echelon.comm.handover import Seat, StoreMeeting
from echelon.comm.over_native import NativeGroup
from tests.contract.group_contract import CHECKS, met

core = native.core()


def work(
    its_rank: int, its_size: int, its_folder: Path, its_address: str, its_host: str, what: str, *args: str
) -> None:
    """Does `what`, a function of this module."""
    global rank, size, folder, address, host, meeting, seat
    rank, size, folder, address, host = its_rank, its_size, its_folder, its_address, its_host
    meeting = StoreMeeting(dist.FileStore(str(folder / "meeting"), size))
    seat = Seat(rank, size, "token of this test", "test")
    globals()[what](*args)
    (folder / f"met-{rank}").touch()


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


def end_me() -> None:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die(how: str) -> None:
    """The last rank dies: while it moves an operation on, or asleep in one that the others never call."""
    g = group()
    met(g.barrier())
    if how == "asleep" and rank == size - 1:
        threading.Timer(0.5, end_me).start()
        g.all_reduce(torch.ones(8 << 20)).wait(Deadline.after(30))
    if how == "asleep":
        while not (folder / "died").exists():
            time.sleep(0.01)
    work = g.all_reduce(torch.ones(8 << 20))
    if rank == size - 1:
        end_me()
    lost(work.wait(Deadline.after(30)))
    assert isinstance(g.barrier().wait(Deadline.after(1)), Lost), "a lost group stays lost"


def run_until_lost() -> None:
    g = group()
    x = torch.ones(1 << 20)
    for turn in range(1 << 30):
        outcome = g.all_reduce(x, "max").wait(Deadline.after(60))
        if turn == 3:
            (folder / f"going-{rank}").touch()
        if isinstance(outcome, Lost):
            lost(outcome)
            return


def differ(how: str) -> None:
    """Rank 1 calls something else than the others."""
    g, x, n = group(), torch.ones(3), 70_000
    meeting.put(f"ready/{rank}", b"")
    for peer in range(size):
        meeting.get(f"ready/{peer}", Deadline.after(60))
    if rank != 1:
        work = g.all_reduce(x)
    elif how == "gather":
        work = g.gather(None, x, 0)
    elif how == "broadcast":
        work = g.broadcast(torch.ones(n), 1)
    else:
        work = g.all_reduce(torch.ones(n))
    began = time.monotonic()
    lost(
        merge([work.wait(Deadline.after(60)), g.barrier().wait(Deadline.after(60))])
    )  # who only sends may be done
    assert time.monotonic() - began < 30


def think(seconds: str) -> None:
    """The last rank comes late, to an operation larger than what sockets hold."""
    g = group()
    met(g.barrier())
    if rank == size - 1:
        time.sleep(float(seconds))
    x = torch.ones(16 << 20)
    met(g.all_reduce(x))
    assert torch.all(x == size)
    met(g.barrier())


def spoil(how: str) -> None:
    """The last rank writes past its core into an open stream of every peer on another host."""
    links = []
    connect = hosts.mesh.connect
    hosts.mesh.connect = lambda *args: links.extend(connect(*args)) or links
    g = group()
    x = torch.ones(1 << 20)
    met(g.all_reduce(x))
    meeting.put(f"through/{rank}", b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work = g.all_reduce(x) if rank != size - 1 else None
    if work is None:
        for peer in range(size):
            meeting.get(f"through/{peer}", Deadline.after(60))
        for streams in links:
            for fd in streams[2:3]:  # the first of a lane
                with socket.socket(fileno=os.dup(fd)) as wire:
                    wire.sendall(random.Random(5).randbytes(64) if how == "garbage" else b"1hce")
                    if how == "cut":
                        wire.shutdown(socket.SHUT_WR)
        work = g.all_reduce(x)
    outcome = work.wait(Deadline.after(60))
    if rank == size - 1 and not isinstance(outcome, Lost):  # the others' parts may have been under way
        outcome = g.barrier().wait(Deadline.after(60))
    lost(outcome)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def messages(where: str) -> None:
    """Everybody sends to everybody, some longer than a ring; half is taken from anybody, half by tag in the reverse order."""
    links = []
    connect = hosts.mesh.connect
    hosts.mesh.connect = lambda *args: links.extend(connect(*args)) or links
    g, others = group(), [peer for peer in range(size) if peer != rank]
    met(g.barrier())
    for n in (0, 1, 1000, 200_000):
        sends = [
            g.send(torch.full((n,), float(rank * 10 + tag)), peer, tag) for tag in range(4) for peer in others
        ]
        x, from_whom = torch.zeros(n), []
        for _ in others:
            work = g.recv(x, None, 0)
            met(work)
            from_whom.append(work.source)
            assert torch.all(x == work.source * 10), (x, work.source)
        assert sorted(from_whom) == others
        rooms = {(peer, tag): torch.zeros(n) for tag in (3, 2, 1) for peer in others}
        taken = [g.recv(room, peer, tag) for (peer, tag), room in rooms.items()]
        for work in [*taken, *sends]:
            met(work)
        assert all(torch.all(room == peer * 10 + tag) for (peer, tag), room in rooms.items())
        met(g.barrier())
    for peer in others:
        near = where[peer] == host
        assert (received(links[peer]) < 1 << 20) == near, (peer, received(links[peer]))
    late = g.recv(torch.zeros(1), None, 9)
    met(g.barrier())
    meeting.put(f"through/{rank}", b"")
    if rank == size - 1:
        for peer in range(size):
            meeting.get(f"through/{peer}", Deadline.after(60))
        g.abort("enough")
    lost(late.wait(Deadline.after(60)))


def received(streams: list[int]) -> int:
    """Bytes that came over these connections (tcpi_bytes_received)."""
    total = 0
    for fd in streams:
        with socket.socket(fileno=os.dup(fd)) as wire:
            total += struct.unpack_from("Q", wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 128)[
                0
            ]
    return total


def storm(num: str, seed: str) -> None:
    """Random operations, several in flight, all known to every rank: what they must give is computed by the reference."""
    from tests.contract.storm import Storm

    g = group()
    Storm(g, int(seed)).run(int(num))
    g.close()
