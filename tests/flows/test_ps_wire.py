"""The parameter server's wire among real processes: garbage, clients that stop, and kills."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import msgpack
import pytest
import torch

from echelon.clock import Deadline
from echelon.control import frames, greet
from echelon.control.handshake import ClientSide, Identity
from echelon.errors import LinkLost
from echelon.ps import frame
from echelon.ps.client import SERVE
from echelon.ps.reach import Address, unix_name
from tests.conftest import ROOT, stand_still
from tests.flows.live_ps import LivePs, live_ps
from tests.flows.test_fuzz import hostile

FRAMES = 3_000
WARM = 500
GROWTH_BYTES = 32 << 20


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = soon(timeout_s)
    while not condition():
        assert not deadline.passed
        time.sleep(0.02)


class Fuzzer:
    """Strangers and insiders, over TCP and the unix socket, with one seeded source of mischief."""

    def __init__(self, live: LivePs, seed: int) -> None:
        self.live, self.random = live, random.Random(seed)
        self.num_sent = 0

    def dial(self) -> socket.socket:
        if self.random.random() < 0.5:
            wire = socket.create_connection(("127.0.0.1", self.live.port), timeout=5)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return wire
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire.settimeout(5)
        wire.connect(unix_name(Address.parse(self.live.address).name))
        return wire

    def stranger(self) -> None:
        self.num_sent += 1
        with self.dial() as wire:
            pick = self.random.randrange(4)
            if pick == 0:
                _try_send(wire, self.random.randbytes(self.random.randrange(1, 300)))
            elif pick == 1:
                _try_send(wire, self.mutate(ClientSide("f" * 64, Identity(SERVE, "worker", 0)).hello()))
            elif pick == 2:
                _try_send(wire, self.call())
            else:
                side = ClientSide(self.random.choice(["f" * 64, "0" * 64]), Identity(SERVE, "worker", 0))
                _try_send(wire, side.hello())
                challenge = frames.unpack(greet.receive(wire, frames.MAX_HELLO_BYTES, soon(5)))
                _try_send(wire, side.prove(challenge))
                answer = greet.receive(wire, frames.MAX_HELLO_BYTES, soon(5))
                assert b"refused" in answer

    def insider(self) -> None:
        """A client that proved the token and sends one bad frame, or several."""
        with self.dial() as wire:
            greet.greet(wire, self.live.token, Identity(SERVE, "worker", self.random.randrange(9)), soon(10))
            wire.settimeout(5)
            for _ in range(self.random.randrange(1, 4)):
                self.num_sent += 1
                if wire.family == socket.AF_UNIX and self.random.random() < 0.3:
                    self.segment(wire)
                else:
                    mischief = self.random.choice([self.call, self.broken, lambda: self.mutate(self.call())])
                    if not _try_send(wire, mischief()):
                        return

    def call(self) -> bytes:
        """A frame of the right form with odd content: shapes, places, verbs, heads."""
        pick = self.random.choice
        verb = pick(
            [
                "tables.push",
                "tables.pull",
                "tables.create",
                "tables.list",
                "tables.__init__",
                "x",
                "silent.x",
                "." * 50,
            ]
        )
        head = {
            pick(["name", "shape", "dtype", "numbers", "begin", "end", "optimizer"]): pick(VALUES)
            for _ in range(4)
        }
        tensors = [
            [pick(VALUES[:9]), pick(SHAPES), pick([-1, 0, 3, 1 << 40]), pick([0, 7, 1 << 50])]
            for _ in range(self.random.randrange(3))
        ]
        rooms = [
            [pick([0, 4, 1 << 20, 1 << 47]), pick([-1, 0, 2]), pick([0, 8])]
            for _ in range(self.random.randrange(3))
        ]
        payload = self.random.randbytes(pick([0, 0, 4, 400]))
        return (
            frame.pack(frame.CALL, self.random.randrange(4), [verb, head, tensors, rooms], len(payload))
            + payload
        )

    def broken(self) -> bytes:
        head = hostile(self.random)
        kind = self.random.randrange(9)
        size = self.random.choice([len(head), 1 << 31, 0])
        payload = self.random.choice([0, 1 << 62, 1 << 20])
        return frame.HEADER.pack(frame.MAGIC, kind, 0, size, payload) + head

    def segment(self, wire: socket.socket) -> None:
        """Shared memory that is not what it is said to be."""
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, 8192)
            pick = self.random.randrange(5)
            if pick == 1:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            sizes = [8192, 8192, 1 << 40, 0, -5]
            head = frame.pack(frame.SEGMENT, 0, [sizes[pick]])
            fds = array.array("i", [fd] * self.random.choice([0, 1, 1, 3, 9]))
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
            try:
                wire.sendmsg([head], extra)
            except OSError:
                pass
        finally:
            os.close(fd)

    def mutate(self, data: bytes) -> bytes:
        held = bytearray(data)
        for _ in range(self.random.randrange(1, 4)):
            held[self.random.randrange(len(held))] ^= 1 << self.random.randrange(8)
        return bytes(held[: self.random.choice([len(held), self.random.randrange(1, len(held) + 1)])])


VALUES = [0, 1, 4, 5, 8, 9, 16, -1, 99, None, True, 1 << 63, 1.5, "", "w", "x" * 5000, b"", [], [4], [1 << 40, 1 << 40], {}, {"lr": "x"},
          {"name": "adam", "numbers": {}}, {"name": "sgd", "numbers": {"lr": 1e400}}, "float32", [[[]]]]  # fmt: skip
SHAPES = [[], [4], [100], [0], [-1], [1 << 47], [1 << 30, 1 << 30], ["x"], [1] * 40, [True]]


def _try_send(wire: socket.socket, data: bytes) -> bool:
    try:
        wire.sendall(data)
        return True
    except OSError:
        return False


@pytest.mark.case("ps: garbage harms nobody")
def test_thousands_of_bad_frames_crash_nothing_grow_nothing_and_let_nobody_in():
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns() % (1 << 32)))
    print(f"seed {seed} (FUZZ_SEED={seed} repeats it)")
    with live_ps() as live, live.client() as near, live.client(shared=False) as far:
        near.create("w", torch.zeros(50_000), lr=1.0)
        fuzzer, warm_bytes, steps = Fuzzer(live, seed), 0, 0
        fds = live.num_fds()
        while fuzzer.num_sent < FRAMES:
            fuzzer.stranger() if fuzzer.random.random() < 0.4 else fuzzer.insider()
            if fuzzer.num_sent % 10 == 0:
                for client in (near, far):
                    client.push_pull("w", torch.ones(50_000)).wait(20)
                    steps += 1
            if not warm_bytes and fuzzer.num_sent >= WARM:
                warm_bytes = live.rss_bytes()
        assert live.process.poll() is None, f"the server died (seed {seed})"
        grown = live.rss_bytes() - warm_bytes
        print(f"{fuzzer.num_sent} frames, {grown >> 10} KiB grown, {steps} proper steps between")
        assert grown < GROWTH_BYTES
        assert far.pull("w").wait().eq(-float(steps)).all()
        assert set(far.tables()) == {"w"}
        until(lambda: live.num_fds() <= fds and live.num_threads() < 12)


def inside(live: LivePs) -> socket.socket:
    """A socket after the handshake and the welcome, for a client that does as it likes."""
    wire = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    greet.greet(wire, live.token, Identity(SERVE, "worker", 1), soon())
    header = frame.header(greet.exactly(wire, frame.HEADER.size, soon()), frame.Limits())
    assert header.kind == frame.WELCOME
    greet.exactly(wire, header.head_bytes, soon())
    return wire


def steps_meanwhile(client, seconds: float) -> list[float]:
    """How long each push-pull took, for so long."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        client.push_pull("w", torch.ones(1000)).wait(20)
        took.append(time.monotonic() - began)
    return took


@pytest.mark.case("ps: a client that stops holds up nobody")
def test_a_client_that_does_not_read_is_ended_and_others_go_on():
    with live_ps(stall_s=3.0, in_flight_bytes=8 << 20) as live, live.client() as client:
        client.create("w", torch.zeros(1000))
        before = live.rss_bytes()
        wire = inside(live)
        call = frame.pack(frame.CALL, 0, ["silent.big", {"numel": 1 << 20}, [], []])
        for number in range(100):  # 400 MiB of answers are asked for, and none is read
            if not _try_send(wire, call[:8] + struct.pack("<Q", number) + call[16:]):
                break
        took = steps_meanwhile(client, 1.0)
        assert max(took) < 2.5
        assert live.rss_bytes() - before < 200 << 20
        wire.settimeout(30)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        until(lambda: live.num_threads() <= 8, 30)
        steps_meanwhile(client, 0.2)
        wire.close()


@pytest.mark.case("ps: a client that stops holds up nobody")
def test_a_frame_that_never_ends_is_ended_and_others_go_on():
    with live_ps(stall_s=3.0) as live, live.client() as client:
        client.create("w", torch.zeros(1000))
        wires = [inside(live) for _ in range(3)]
        whole = frame.pack(frame.CALL, 0, ["tables.push", {"name": "w"}, [[0, [1000], -1, 0]], []], 4000)
        for wire, piece in zip(wires, (whole[:10], whole[:-3], whole + bytes(3999)), strict=True):
            wire.sendall(piece)
        assert max(steps_meanwhile(client, 0.5)) < 2.5
        for wire in wires:
            wire.settimeout(20)
            said = wire.recv(4096)
            assert b"began a frame and sent nothing more for 3 s" in said
            wire.close()
        assert client.tables()["w"]["version"] > 0


CLIENT = """
import os, sys, torch
from echelon.clock import Deadline
from echelon.control.handshake import Identity
from echelon.ps.link import Link
link = Link.connect(sys.argv[1], sys.stdin.readline().strip(), Identity("serve", "worker", 7), Deadline.after(30), shared=sys.argv[2] == "1")
x = link.buffer(8 << 20)
pending = [link.call("silent.x", {}, x, x) for _ in range(4)]
print("sent", flush=True)
while True:
    for p in [link.call("tables.push", {"name": "w"}, torch.ones(1000)) for _ in range(20)]:
        p.wait(Deadline.after(30))
"""


@pytest.mark.case("ps: kill -9 of a client or a server in mid-call")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_client_killed_in_mid_call_leaves_nothing_in_the_server(shared):
    with live_ps() as live, live.client() as client:
        client.create("w", torch.zeros(1000), lr=1.0)
        fds, segments, threads = live.num_fds(), live.num_segments(), live.num_threads()
        for _ in range(3):
            before = float(client.pull("w").wait(20).min())
            process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, live.address, str(int(shared))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin, process.stdout:
                try:
                    process.stdin.write(live.token + "\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == "sent\n"
                    until(lambda before=before: client.pull("w").wait(20).min() < before - 20)
                    assert live.num_segments() > segments or not shared
                finally:
                    process.kill()
                    process.wait()
        until(
            lambda: (
                live.num_fds() == fds and live.num_segments() == segments and live.num_threads() <= threads
            )
        )
        values = client.pull("w").wait()
        assert values.min() == values.max()
        assert -values[0] == client.tables()["w"]["version"]


@pytest.mark.case("ps: kill -9 of a client or a server in mid-call")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_server_killed_in_mid_call_is_told_at_once(shared):
    with live_ps() as live:
        link = live.link(shared=shared)
        big = torch.zeros(20 << 20)
        calls = [link.call("silent.x", {}, big, big) for _ in range(3)]
        told: list[float] = []
        calls[2].then(lambda: told.append(time.monotonic()))
        time.sleep(0.1)
        killed = time.monotonic()
        os.kill(live.process.pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(LinkLost, match="is gone"):
                call.wait(soon(10))
        assert told[0] - killed < 3.0
        with pytest.raises(LinkLost):
            link.call("silent.x", {})
        threads = threading.active_count()
        link.close()
        assert threading.active_count() <= threads
        big.zero_()


def test_a_stopped_server_is_late_and_then_answers():
    from echelon.errors import Late

    with live_ps() as live, live.client() as client:
        client.create("w", torch.zeros(3), lr=1.0)
        stand_still(live.process.pid)
        work = client.push_pull("w", torch.ones(3))
        with pytest.raises(Late):
            work.wait(0.3)
        os.kill(live.process.pid, signal.SIGCONT)
        assert work.wait(20).eq(-1).all()


def test_shared_memory_that_could_shrink_is_refused():
    """Reading behind the end of a file is a SIGBUS: it would end the server."""
    with live_ps() as live:
        for seal, size, told in ((False, 8192, 8192), (True, 4096, 8192), (True, 8192, 8192)):
            wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            wire.settimeout(10)
            wire.connect(unix_name(Address.parse(live.address).name))
            greet.greet(wire, live.token, Identity(SERVE, "worker", 1), soon())
            fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, size)
            if seal:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            socket.send_fds(wire, [frame.pack(frame.SEGMENT, 0, [told])], [fd])
            with contextlib.suppress(BrokenPipeError):  # it may have hung up by now
                wire.sendall(frame.pack(frame.CALL, 1, ["tables.list", {}, [], []]))
            said = b""
            while b"tables" not in said[200:] and b"shared memory must be" not in said:
                piece = wire.recv(4096)
                if not piece:
                    break
                said += piece
            assert (b"shared memory must be" in said) == (not (seal and size == told)), said
            os.close(fd)
            wire.close()
        assert live.process.poll() is None


def test_heads_are_msgpack_without_surprises():
    for data in (
        msgpack.packb(msgpack.Timestamp(1, 1)),
        msgpack.packb(msgpack.ExtType(3, b"x")),
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
    ):
        with pytest.raises(Exception, match="msgpack of ours"):
            frame.unpack(data)
