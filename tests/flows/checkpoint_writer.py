"""A nursery: imports torch once, then forks writers of checkpoints, to be killed at any moment.

Reads lines: `solo TARGET START` forks a writer whose two ranks are threads; `rank RANK SIZE TARGET COORDINATOR` (token in the
next line) one rank of several processes; `reap PID` waits for a writer that was killed. Answers each with a line.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import Saved
from echelon.checkpoint.meeting import MemberMeeting, Room
from echelon.checkpoint.saver import Saver
from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.env import Place
from echelon.mesh.layout import Key, Span

SHAPES = {"embedding": (300, 1000), "weight": (700, 999), "bias": (999,), "count": ()}


def state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}


def tree(step: int, rank: int) -> dict[str, object]:
    return {"step": step, "rank": rank, "random": torch.full((5,), step)}


def check(saved: Saved) -> None:
    """Everything in it is of one step."""
    for name, tensor in state(saved.step).items():
        out = torch.empty_like(tensor)
        saved.read(Key(name), out)
        assert torch.equal(out, tensor), name
    for rank in range(saved.world_size):
        found = saved.objects(rank)
        assert (found["step"], found["rank"]) == (saved.step, rank)
        assert found["random"].tolist() == [saved.step] * 5


def save(saver: Saver, step: int) -> None:
    every = tuple(range(saver.size))
    held = [Holding(Key(n), t, Span.whole(tuple(t.shape)), every) for n, t in state(step).items()]
    handle = saver.save(step, held, tree(step, saver.rank), {})
    saver.before_change()
    handle.wait(Deadline.after(60))


def solo(target: str, start: int) -> None:
    """Two ranks as threads, for ever; each complete step is acknowledged in TARGET.acks."""
    room = Room(2)
    acks = os.open(target + ".acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def rank_body(rank: int) -> None:
        saver = Saver(target, rank, 2, room.meeting(rank), lambda event: None, keep=1 + start % 2)
        for step in range(start, start + 10_000):
            save(saver, step)
            if rank == 0:
                os.write(acks, f"{step}\n".encode())

    other = threading.Thread(target=rank_body, args=(1,), daemon=True)
    other.start()
    rank_body(0)


def one_rank(rank: int, size: int, target: str, coordinator: str, token: str) -> None:
    """One of several processes; says how it ended in TARGET.rank-R."""
    place = Place(run="test-run", rank=rank, world_size=size, coordinator=coordinator, host="here")
    member = Member.join(place, token, Deadline.after(30))
    saver = Saver(target, rank, size, MemberMeeting(member, rank, size, term=1), lambda event: None)
    say(target, rank, "running")
    said = "done"
    try:
        for step in range(1, 200):
            save(saver, step)
            say(target, rank, f"saved {step}")
    except Exception as error:
        said = f"failed: {error}"
    say(target, rank, said)
    os._exit(0)


def say(target: str, rank: int, text: str) -> None:
    """At once: a reader never sees half of it."""
    partial = Path(f"{target}.rank-{rank}.partial")
    partial.write_text(text)
    partial.replace(f"{target}.rank-{rank}")


def serve() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        what, *args = line.split()
        if what == "reap":
            os.waitpid(int(args[0]), 0)
            print("reaped", flush=True)
            continue
        token = sys.stdin.readline().strip() if what == "rank" else ""
        pid = os.fork()
        if pid == 0:
            try:
                random.seed()
                if what == "solo":
                    solo(args[0], int(args[1]))
                else:
                    one_rank(int(args[0]), int(args[1]), args[2], args[3], token)
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
