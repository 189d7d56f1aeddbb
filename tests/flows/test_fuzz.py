"""Ten thousand frames at the coordinator's socket: it stays up, stays small, lets nobody in, and works afterwards."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from echelon.clock import Deadline
from echelon.control import frames
from echelon.control.handshake import ClientSide, Identity, Session
from tests.flows.live_coordinator import RUN, LiveCoordinator, coordinator

FRAMES = 10_000
WARM = 1_000
GROWTH_BYTES = 20 << 20


class Fuzzer:
    """Strangers and insiders with one seeded source of mischief."""

    def __init__(self, live: LiveCoordinator, seed: int) -> None:
        self.live, self.random = live, random.Random(seed)
        self.port = int(live.address.split(":")[1])
        self.num_sent = 0
        self.inside: Insider | None = None

    def dial(self) -> socket.socket:
        wire = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # hang up with RST, so that ten thousand connections do not fill the table of ports
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return wire

    # strangers

    def stranger(self) -> None:
        """One connection without the token: garbage, or a handshake with something wrong. Nobody is let in."""
        self.num_sent += 1
        with self.dial() as wire:
            if self.random.random() < 0.5:
                _try_send(wire, self.garbage())
                return
            side = ClientSide(self.random.choice(["0" * 64, "", "f" * 64]), Identity(RUN, "worker", 0))
            hello = side.hello()
            if self.random.random() < 0.5:
                _try_send(wire, self.mutate(hello))
                return
            _try_send(wire, hello)
            challenge = _try_read(wire)
            assert challenge is not None, "a proper greeting must be answered"
            proof = side.prove(frames.unpack(challenge))
            if self.random.random() < 0.5:
                proof = frames.hello({"proof": self.random.randbytes(self.random.choice([0, 16, 32, 33]))})
            _try_send(wire, self.mutate(proof) if self.random.random() < 0.3 else proof)
            wire.settimeout(0.2)
            answer = _try_read(wire)
            assert answer is None or b"refused" in answer, f"let in: {answer!r}"

    def garbage(self) -> bytes:
        pick = self.random.randrange(4)
        if pick == 0:
            return self.random.randbytes(self.random.randrange(1, 200))
        if pick == 1:
            return struct.pack(">I", self.random.choice([0, 1, 4096, 4097, 1 << 20, 0xFFFFFFFF])) + b"\x81"
        if pick == 2:
            return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        payload = hostile(self.random)
        return struct.pack(">I", len(payload)) + payload

    def mutate(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        pick = self.random.randrange(4)
        if pick == 0:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        elif pick == 1:
            del data[self.random.randrange(len(data)) :]
        elif pick == 2:
            data += self.random.randbytes(self.random.randrange(1, 40))
        else:
            at = self.random.randrange(len(data))
            data[at : at + 4] = self.random.randbytes(4)
        return bytes(data)

    # insiders

    def insider(self) -> None:
        """One frame of a client that proved the token, mutated after the handshake."""
        self.num_sent += 1
        if self.inside is None:
            self.inside = Insider(self)
        mischief = self.random.choice(
            (self.torn, self.broken, self.broken, self.wrong, self.wrong, self.wrong)
        )
        _try_send(self.inside.wire, mischief(self.inside))
        if mischief == self.wrong:
            answer = _try_read(self.inside.wire)
            assert answer is not None, "a well-formed call must be answered"
            told = self.inside.opener.open(answer)
            assert "error" in told or "result" in told
            assert "failed in the coordinator" not in str(told.get("error")), told
            return
        if mischief == self.broken:
            assert _try_read(self.inside.wire) is None, "a frame that does not open must end the connection"
        self.inside.wire.close()
        self.inside = None

    def torn(self, inside: Insider) -> bytes:
        """A good frame with its bytes changed, cut or added to."""
        return self.mutate(
            inside.seal(frames.pack({"id": 1, "method": "store.count", "args": {}}), inside.counter)
        )

    def broken(self, inside: Insider) -> bytes:
        """A whole frame that must end the connection: out of order, of another key, or not a call."""
        call = frames.pack({"id": 1, "method": "store.count", "args": {}})
        pick = self.random.randrange(4)
        if pick == 0:
            return inside.seal(call, self.random.choice([inside.counter + 1, 1 << 63]))
        if pick == 1:
            return inside.seal(call, inside.counter, key=b"another")
        if pick == 2:
            return inside.seal(hostile(self.random), inside.counter)
        return inside.seal(frames.pack(self.random.choice(NOT_CALLS)), inside.counter)

    def wrong(self, inside: Insider) -> bytes:
        """A frame that opens but asks for what cannot be: an error comes back, the connection lives on."""
        method = self.random.choice([*METHODS, "os.system", "__class__", "", "store." * 100])
        args = {
            name: self.random.choice(VALUES) for name in self.random.sample(NAMES, self.random.randrange(6))
        }
        if method in ("store.get", "store.wait", "watch"):
            args["timeout_s"] = self.random.choice([0.0, -1.0, float("nan"), "1"])
        if method == "seen" and self.random.random() < 0.8:
            args = {name: self.told() for name in ("ranks", "stacks")}
        if method == "died" and args.get("rank") == 0:
            args["rank"] = 7  # worker 0 is asked at the end whether it is still there
        call = {"id": self.random.choice([0, -1, 1 << 63]), "method": method, "args": args}
        frame = inside.seal(frames.pack(call), inside.counter)
        inside.counter += 1
        return frame

    def told(self) -> Any:
        """What a host's supervisor might say of its processes: some of it right, of rank 0 too."""
        if self.random.random() < 0.1:
            return self.random.choice(VALUES)
        return {
            self.random.choice(RANKS): self.random.choice(PROCESSES) for _ in range(self.random.randrange(5))
        }


NAMES = ["key", "keys", "value", "amount", "beat", "events", "first", "after", "timeout_s", "expected", "desired",
         "term", "host", "pid", "rank", "code", "step", "name", "address", "workers", "probe_port", "known", "problems", "reason",
         "sent", "ranks", "stacks"]  # fmt: skip
METHODS = ["describe", "join", "beat", "roster", "leave", "died", "watch", "stop", "store.set", "store.get",
           "store.wait", "store.add", "store.check", "store.compare_set", "store.delete", "store.count", "host.enlist",
           "host.refuse", "host.reached", "host.gathered", "host.cancel", *["seen"] * 6]  # fmt: skip
ROLES = ["cli", "supervisor"]
RANKS = ["0", "1", "7", "999999", "9" * 30, "9" * 5000, "-1", "", "x", "\u00b2", "\u0663", "0x1", " 1"]
PROCESSES: list[Any] = [["S", 1.0], ["T", 3], ["S", float("nan")], ["", -1.0], ["SSSS", True], ["R", "x"], ["R"], "R", None, [],
                        ["train.py:1 f"], ["x" * 5000] * 100, [["f"]], [None], {"R": 1.0}, [b"R", 1.0], 1 << 63]  # fmt: skip
VALUES: list[Any] = [None, True, 0, -1, (1 << 64) - 1, 1.5, float("inf"), "", "k", "x" * 5000, b"", b"v" * 100, [], ["k"],
                     [["k"]], [1], {}, {"event": "Beat"}, [{"event": "Beat", "step": "x"}], [{"event": "Warned", "message": "t"}],
                     [{"event": "Logged", "step": 1 << 62, "values": {"a": 1}, "weight": -1.0}], [{"event": "No"}]]  # fmt: skip
NOT_CALLS: list[Any] = [None, 1, "call", [], {}, {"id": 1}, {"id": "1", "method": "describe", "args": {}},
                        {"id": 1, "method": ["x"], "args": {}}, {"id": 1, "method": "describe", "args": []},
                        {"id": 1, "method": "describe", "args": {}, "more": 1}]  # fmt: skip


def hostile(source: random.Random) -> bytes:
    """msgpack that a careless reader would choke on."""
    shapes: list[Callable[[], bytes]] = [
        lambda: b"\x91" * 900 + b"\xc0",  # deep
        lambda: b"\x91" * 3000 + b"\xc0",
        lambda: b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        lambda: b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        lambda: b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        lambda: msgpack.packb(msgpack.ExtType(5, b"code")),
        lambda: msgpack.packb(msgpack.Timestamp(1, 1)),
        lambda: b"\xc7\x00\x05",
        lambda: msgpack.packb({1: 2}),
        lambda: msgpack.packb({b"id": 1}),
        lambda: b"\xa2\xff\xfe",  # not UTF-8
        lambda: b"\x81\xa2id\x01\x00",  # something after the value
        lambda: b"\xc1",  # never used
        lambda: b"cos\nsystem\n(S'true'\ntR.",  # a pickle
        lambda: source.randbytes(source.randrange(1, 300)) + b"\xc1",
    ]
    return source.choice(shapes)()


class Insider:
    """A connection after a proper handshake, with its keys laid open."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.wire = fuzzer.dial()
        side = ClientSide(
            fuzzer.live.token, Identity(RUN, fuzzer.random.choice(ROLES), fuzzer.random.randrange(4))
        )
        self.wire.sendall(side.hello())
        self.wire.sendall(side.prove(frames.unpack(_read(self.wire))))
        self.session: Session = side.finish(frames.unpack(_read(self.wire)))
        self.opener = frames.Opener(self.session.from_server)
        self.counter = 0

    def seal(self, payload: bytes, counter: int, key: bytes | None = None) -> bytes:
        """A frame with a right MAC (or one under another key) over any payload and counter."""
        number = struct.pack(">Q", counter)
        mac = hmac.new(key or self.session.from_client, number + payload, hashlib.sha256).digest()[:16]
        return struct.pack(">I", 24 + len(payload)) + number + mac + payload


def _read(wire: socket.socket) -> bytes:
    def exactly(num_bytes: int) -> bytes:
        held = b""
        while len(held) < num_bytes:
            piece = wire.recv(num_bytes - len(held))
            if not piece:
                raise ConnectionError("closed")
            held += piece
        return held

    return exactly(struct.unpack(">I", exactly(4))[0])


def _try_read(wire: socket.socket) -> bytes | None:
    try:
        return _read(wire)
    except OSError:
        return None


def _try_send(wire: socket.socket, data: bytes) -> None:
    try:
        wire.sendall(data)
    except OSError:
        pass


@pytest.mark.case("fuzz")
def test_ten_thousand_frames_crash_nothing_grow_nothing_and_let_nobody_in(tmp_path):
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns() % (1 << 32)))
    print(f"seed {seed} (FUZZ_SEED={seed} repeats it)")
    with coordinator(tmp_path) as live:
        proper = live.member(0)
        fuzzer = Fuzzer(live, seed)
        warm_bytes = 0
        while fuzzer.num_sent < FRAMES:
            fuzzer.stranger() if fuzzer.num_sent % 2 else fuzzer.insider()
            if fuzzer.num_sent == WARM:
                warm_bytes = live.rss_bytes()
        if fuzzer.inside is not None:
            fuzzer.inside.wire.close()
        assert live.process.poll() is None, f"the coordinator died (seed {seed})"
        grown = live.rss_bytes() - warm_bytes
        print(f"{fuzzer.num_sent} frames, {grown >> 10} KiB grown")
        assert grown < GROWTH_BYTES, f"{grown >> 20} MiB grown (seed {seed})"
        assert proper.roster()[0]["state"] == "joined"
        fresh = live.client()
        assert fresh.call("store.add", Deadline.after(10), key="after", amount=1) == 1
        fresh.close()
        proper.close()
        assert live.close() == 0
