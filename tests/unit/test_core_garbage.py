"""What an open stream of the core's TCP group may carry: anything. The group is lost, says why, and stays small."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.unit.test_core_tcp import ALL_REDUCE, F32, SOON_S, at, collective, mesh

pytestmark = pytest.mark.needs("core")

MAGIC, TERM = 0x65636831, 1
DATA, MESSAGE, OFFER, PAYLOAD, READY, CREDIT, FAILURE, LEAVE, KNOCK = range(1, 10)
CONTROL, MESSAGES, LANE = 0, 1, 2
GROWTH_BYTES = 64 << 20
FULL = (1 << 64) - 1
DATA_OF = {rank: np.ones(4, "f4") for rank in (0, 2)}


def all_but_rank_1(made):
    return [collective(made.groups[rank], ALL_REDUCE, x) for rank, x in DATA_OF.items()]


def head(what, *, magic=MAGIC, lane=0, slot=0, term=TERM, number=0, offset=0, num=0, total=0, kind=ALL_REDUCE, dtype=F32, op=0, root=0, count=4):  # fmt: skip
    return struct.pack("<IBBHQQQQQBBBBiQ", magic, what, lane, slot, term, number, offset, num, total, kind, dtype, op, 0, root, count)  # fmt: skip


def put(fd, data):
    """Writes into a stream that belongs to the core, past it. A group that is lost reads no further."""
    with socket.socket(fileno=os.dup(fd)) as wire, contextlib.suppress(TimeoutError):
        wire.settimeout(1)
        wire.sendall(data)


def cut(fd):
    with socket.socket(fileno=os.dup(fd)) as wire:
        wire.shutdown(socket.SHUT_WR)


def peak_bytes():
    """Of this program; getrusage would count what the process was before it ran this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


SPOILS = {
    "random bytes in a lane": (LANE, [random.Random(1).randbytes(5000)]),
    "random bytes among messages": (MESSAGES, [random.Random(2).randbytes(5000)]),
    "random bytes for control": (CONTROL, [random.Random(3).randbytes(5000)]),
    "an older term": (LANE, [head(DATA, term=0, num=16, total=16)]),
    "a later term": (MESSAGES, [head(MESSAGE, term=2, num=16, total=16)]),
    "a message in a lane": (LANE, [head(MESSAGE, number=1, num=8, total=8)]),
    "data for another lane": (LANE, [head(DATA, lane=1, num=16, total=16)]),
    "data among messages": (MESSAGES, [head(DATA, num=16, total=16)]),
    "a slot that is not there": (LANE, [head(DATA, slot=60000, num=16, total=16)]),
    "a part beyond the whole": (LANE, [head(DATA, offset=8, num=16, total=16)]),
    "a part that wraps around": (LANE, [head(DATA, offset=FULL - 4, num=16, total=16)]),
    "twice the same part": (LANE, [head(DATA, num=12, total=16) + bytes(12)] * 2),
    "nothing of something": (LANE, [head(DATA, num=0, total=16)]),
    "a message without end": (MESSAGES, [head(MESSAGE, number=1, num=FULL - 63, total=FULL - 63)]),
    "a message of 1 TiB": (MESSAGES, [head(MESSAGE, number=1, num=1 << 40, total=1 << 40)]),
    "more messages than the window": (MESSAGES, [head(MESSAGE, number=n, num=1 << 20, total=1 << 20, root=n) + bytes(1 << 20) for n in range(1, 6)]),
    "an offer with a payload": (MESSAGES, [head(OFFER, number=1, num=8, total=8) + bytes(8)]),
    "the same offer twice": (MESSAGES, [head(OFFER, number=1, total=8)] * 2),
    "a payload that nobody asked for": (MESSAGES, [head(PAYLOAD, number=5, num=8, total=8) + bytes(8)]),
    "a failure without end": (CONTROL, [head(FAILURE, num=1 << 40)]),
    "a failure without words": (CONTROL, [head(FAILURE)]),
    "a failure that blames nobody there is": (CONTROL, [head(FAILURE, num=12) + struct.pack("<iii", 1 << 30, -5, 77)]),
    "a failure in no language": (CONTROL, [head(FAILURE, num=8) + struct.pack("<i", 0) + b"\xff\xfe\xc3("]),
    "control of no kind": (CONTROL, [head(77)]),
}  # fmt: skip


@pytest.mark.case("TCP: garbage in an open stream")
@pytest.mark.parametrize("spoil", SPOILS)
def test_what_cannot_be_ends_the_group_and_names_who_sent_it(spoil):
    stream, frames = SPOILS[spoil]
    with mesh(3) as made:
        before, room = peak_bytes(), np.zeros(8, "u1")
        works = [made.groups[0].message(False, at(room), room.size, 1, 99), *all_but_rank_1(made)]
        for frame in frames:
            put(made.wires[1][0][stream], frame)
        for work in works:
            assert not work.wait(SOON_S)
        for group in (made.groups[0], made.groups[2]):
            peers, reason, cause = group.failure()
            assert peers == [1], reason
            assert reason
            assert cause in ("broken", "gave up")
        assert peak_bytes() - before < GROWTH_BYTES


def test_a_part_without_end_is_told_as_a_difference_between_two():
    with mesh(3) as made:
        works = all_but_rank_1(made)
        put(made.wires[1][0][LANE], head(DATA, num=FULL, total=FULL))
        for work in works:
            assert not work.wait(SOON_S)
        assert "rank 1 and rank 0 went different ways" in made.groups[0].failure()[1]
        assert "rank 1 and rank 0 went different ways" in made.groups[2].failure()[1]


@pytest.mark.case("TCP: garbage in an open stream")
@pytest.mark.parametrize("stream", [CONTROL, MESSAGES, LANE])
@pytest.mark.parametrize("told", [1, 63, 64, 70])
def test_a_frame_that_breaks_off_loses_who_sent_it(stream, told):
    what = {CONTROL: FAILURE, MESSAGES: MESSAGE, LANE: DATA}[stream]
    frame = head(what, number=int(stream == MESSAGES), num=16, total=16) + bytes(16)
    with mesh(3) as made:
        works = all_but_rank_1(made)
        put(made.wires[1][0][stream], frame[:told])
        cut(made.wires[1][0][stream])
        for work, group in zip(works, (made.groups[0], made.groups[2]), strict=True):
            assert not work.wait(SOON_S)
            assert group.failure()[0] == [1]
            assert "the connection to rank 1 is gone" in group.failure()[1]


def test_a_reason_that_is_cut_inside_a_letter_can_be_read():
    with mesh(2) as made:
        made.groups[0].abort([], "x" + "é" * 2000)
        work = collective(made.groups[1], ALL_REDUCE, np.ones(4, "f4"))
        assert not work.wait(SOON_S)
        assert "éé" in made.groups[1].failure()[1]


STORM = """
    import random, resource, sys
    import numpy as np
    from tests.unit.test_core_garbage import DATA, KNOCK, SOON_S, head, peak_bytes, put
    from tests.unit.test_core_tcp import ALL_REDUCE, at, collective, mesh

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    draw = random.Random(int(sys.argv[1]))
    numbers = [0, 0, 1, 2, 15, 16, 17, 64, 4096, 4 << 20, (4 << 20) - 64, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 64, (1 << 64) - 1]
    for turn in range(int(sys.argv[2])):
        with mesh(2) as made:
            one, room, x = made.groups[0], np.zeros(16, "u1"), np.ones(draw.choice([4, 4, 40_000]), "f4")
            works = [one.message(False, at(room), 16, draw.choice([-1, 1]), 0)]
            works.append(one.message(True, at(x), x.nbytes, 1, 0))
            works.append(collective(one, ALL_REDUCE, x))
            for _ in range(draw.randrange(1, 5)):
                stream = draw.randrange(6)
                what = [draw.randrange(5, 10), draw.randrange(2, 5), 1, 1, 1, 1][stream] if draw.random() < 0.9 else draw.randrange(12)
                fields = {"lane": draw.choice([0, (stream - 2) // 2 if stream > 1 else 0]), "slot": draw.choice([0, 0, 1, 2, 65535])}
                fields |= {name: draw.choice(numbers) for name in ("number", "offset", "num", "total")}
                if draw.random() < 0.5:
                    fields["total"] = fields["num"]
                if draw.random() < 0.3:
                    fields |= {"num": x.nbytes // 2, "total": x.nbytes // 2, "offset": 0, "number": 0}
                put(made.wires[1][0][stream], head(what, count=x.size, **fields) + draw.randbytes(min(fields["num"], draw.choice([0, 16, 5000]))))
            for work in works:
                work.wait(0.02)
            assert not works[-1].wait(SOON_S), "the other rank never called it"
            one.failure()
    print("peak", peak_bytes())
"""


@pytest.mark.case("TCP: garbage in an open stream")
def test_two_hundred_groups_survive_frames_of_every_kind():
    """In a process of its own, whose memory is limited: a crash would be its exit code."""
    argv = [sys.executable, "-c", textwrap.dedent(STORM), "4", "200"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert int(done.stdout.split()[-1]) < 500 << 20
