"""Random operations among forked ranks in shared memory, with kills and cancels: equal to the reference, or a clean Lost.

    python tests/contract/games.py [operations] [seed]

Every game has a fresh group of 2 to 8 processes. In some a rank is killed with -9, in some one calls off; then every other rank must
get Lost, naming the killed one, soon. Prints how soon, and whether anything was left behind.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from echelon import native
from echelon.comm import handover
from echelon.comm.group import Lost
from echelon.comm.over_native import NativeGroup
from tests.contract.storm import Storm

OPERATIONS_A_GAME = 150
FINE, LOST, WRONG = 0, 3, 4
WORD = struct.Struct("dq")
PLAYED: set[str] = set()
"""Every process of every game."""


def play(rank: int, fds: list[int], seed: int, num: int, cancels_at: int | None, tell: int) -> int:
    """One rank's game. A loss is told with its time and who was lost (-1: nobody by name)."""
    torch.set_num_threads(1)
    group = NativeGroup(
        native.core().ShmGroup(rank, fds[0], fds[1:], 1), rank, len(fds) - 1, torch.device("cpu")
    )
    try:
        storm = Storm(group, seed)
        if cancels_at is not None:
            storm.run(cancels_at)
            group.abort("called off on purpose")
        storm.run(num)
    except AssertionError as error:
        lost = error.args[0] if error.args else None
        if not isinstance(lost, Lost):
            print(f"seed {seed} rank {rank}: {error}", file=sys.stderr, flush=True)
            return WRONG
        os.write(tell, WORD.pack(time.monotonic(), lost.peers[0] if lost.peers else -1))
        return LOST
    group.close()
    return FINE


def game(draw: random.Random, num: int) -> list[float]:
    """Seconds from a kill to each survivor's Lost; AssertionError when anything was not as it must be."""
    size, seed = draw.randrange(2, 9), draw.randrange(2**31)
    how = draw.choice(["calm", "calm", "kill", "kill", "cancel"])
    core, chunk, ring = native.core(), handover.chunk_bytes(size), handover.RING_BYTES
    fds = [os.memfd_create(f"game-{i}") for i in range(size + 1)]
    core.format(fds[0], size, chunk, ring, 1)
    for fd in fds[1:]:
        core.reserve(fd, size, chunk, ring)
    victim, cancels_at = draw.randrange(size), draw.randrange(num)
    reading, writing = os.pipe()
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = WRONG
            try:
                code = play(
                    rank, fds, seed, num, cancels_at if how == "cancel" and rank == victim else None, writing
                )
            finally:
                os._exit(code)
        pids.append(pid)
    PLAYED.update(map(str, pids))
    os.close(writing)
    killed = 0.0
    if how == "kill":
        time.sleep(draw.uniform(0.0, 0.3))
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    told = os.read(reading, 4096)
    for fd in [*fds, reading]:
        os.close(fd)
    about = f"{how} seed {seed} of {size} ranks, victim {victim}: {codes}"
    losses = [WORD.unpack_from(told, at) for at in range(0, len(told), WORD.size)]
    if how == "calm":
        assert codes == [FINE] * size, about
    elif how == "kill":
        assert codes[victim] in (-signal.SIGKILL, FINE), about
        assert all(code in (FINE, LOST) for rank, code in enumerate(codes) if rank != victim), about
        assert all(peer == victim for _, peer in losses), (about, losses)
    else:
        assert WRONG not in codes, about
    return [max(0.0, at - killed) for at, _ in losses] if how == "kill" else []


def main(operations: int, seed: int) -> None:
    draw, soon, done, games = random.Random(seed), [], 0, 0
    while done < operations:
        soon += game(draw, OPERATIONS_A_GAME)
        done, games = done + OPERATIONS_A_GAME, games + 1
    left = [name for name in os.listdir("/dev/shm") if PLAYED.intersection(name.split("_"))]
    assert left == []
    times = (
        f"median {statistics.median(soon) * 1e3:.0f} ms, most {max(soon) * 1e3:.0f} ms" if soon else "nobody"
    )
    print(
        f"seed {seed}: {done} operations in {games} games; from a kill to Lost: {times} ({len(soon)} survivors)"
    )


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 3000,
        int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 10**6,
    )
