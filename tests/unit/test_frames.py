"""Frames and handshake as bytes: what opens, and what must not."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.control import calls, frames, token
from echelon.control.handshake import ClientSide, Identity, Refused, ServerSide, refusal
from echelon.errors import AuthError, EchelonError, PeerLost, UsageError, WireError

KEY = b"k" * 32
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


def body(frame: bytes) -> bytes:
    length = frames.length_of(frame[:4], frames.MAX_FRAME_BYTES)
    assert length == len(frame) - 4
    return frame[4:]


@settings(deadline=None, max_examples=100)
@given(st.lists(values, min_size=1, max_size=4))
def test_what_is_sealed_opens_in_order(messages):
    sealer, opener = frames.Sealer(KEY), frames.Opener(KEY)
    assert [opener.open(body(sealer.seal(m))) for m in messages] == messages


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_changed_bit_is_noticed(data):
    frame = bytearray(body(frames.Sealer(KEY).seal({"a": [1, "x", b"y"]})))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        frames.Opener(KEY).open(bytes(frame))


def test_a_frame_repeated_left_out_or_of_another_key_does_not_open():
    sealer = frames.Sealer(KEY)
    first, second = body(sealer.seal(1)), body(sealer.seal(2))
    opener = frames.Opener(KEY)
    assert opener.open(first) == 1
    with pytest.raises(WireError, match="frame 0 came where frame 1 was due"):
        opener.open(first)
    with pytest.raises(WireError, match="frame 1 came where frame 0 was due"):
        frames.Opener(KEY).open(second)
    with pytest.raises(WireError, match="MAC"):
        frames.Opener(b"another").open(first)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x91" * 40 + b"\xc0",
        b"\x91" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([0] * (frames.MAX_ITEMS + 1)),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({1: 1}),
        msgpack.packb({b"k": 1}),
        b"\xa1\xff",
        b"\x01\x01",
        b"\xc1",
    ],
)
def test_msgpack_that_is_not_ours_is_a_wire_error(payload):
    with pytest.raises(WireError):
        frames.unpack(payload)


@pytest.mark.parametrize(
    ("header", "limit"), [(b"\0\0\0\0", 10), (b"\0\0\0\x0b", 10), (b"\xff\xff\xff\xff", 16 << 20)]
)
def test_a_length_is_judged_before_anything_is_read(header, limit):
    with pytest.raises(WireError):
        frames.length_of(header, limit)


def test_a_message_over_the_limit_is_the_senders_error_and_uses_up_no_frame():
    sealer = frames.Sealer(KEY)
    with pytest.raises(UsageError, match="16 MiB"):
        sealer.seal(bytes(16 << 20))
    with pytest.raises(UsageError, match="cannot travel"):
        sealer.seal({"x": object()})
    assert sealer.counter == 0


def shake(client_token: str, server_token: str, who: Identity, run: str = "r") -> tuple[bool, Identity]:
    ours, theirs = ClientSide(client_token, who), ServerSide(server_token, run)
    challenge = frames.unpack(theirs.challenge(frames.unpack(ours.hello()[4:]))[4:])
    session, proof = theirs.finish(frames.unpack(ours.prove(challenge)[4:]))
    return ours.finish(frames.unpack(proof[4:])) == session, theirs.identity


def test_a_handshake_gives_both_sides_the_same_keys_and_who_it_is():
    who = Identity("r", "worker", 3, 1)
    assert shake("t" * 64, "t" * 64, who) == (True, who)


@pytest.mark.parametrize(
    ("client_token", "who", "code"),
    [
        ("u" * 64, Identity("r", "worker", 0), "token"),
        ("", Identity("r", "worker", 0), "token"),
        ("t" * 64, Identity("q", "worker", 0), "run"),
        ("t" * 64, Identity("r", "coordinator", 0), "role"),
        ("t" * 64, Identity("r", "worker", -1), "role"),
        ("u" * 64, Identity("q", "root", 0), "token"),
    ],
)
def test_who_is_refused_and_what_a_stranger_learns_of_it(client_token, who, code):
    with pytest.raises(Refused) as caught:
        shake(client_token, "t" * 64, who)
    assert caught.value.code == code


def test_a_recorded_handshake_is_of_no_use():
    who, word = Identity("r", "worker", 0), "t" * 64
    recorded = ClientSide(word, who)
    first = ServerSide(word, "r")
    proof = frames.unpack(
        recorded.prove(frames.unpack(first.challenge(frames.unpack(recorded.hello()[4:]))[4:]))[4:]
    )
    first.finish(proof)
    second = ServerSide(word, "r")
    second.challenge(frames.unpack(recorded.hello()[4:]))
    with pytest.raises(Refused):
        second.finish(proof)


def test_a_servers_proof_is_not_the_clients_sent_back():
    ours = ClientSide("t" * 64, Identity("r", "worker", 0))
    proof = frames.unpack(ours.prove({"nonce": b"n" * 32})[4:])
    with pytest.raises(AuthError, match="does not know"):
        ours.finish(proof)
    with pytest.raises(AuthError, match="another run"):
        ours.finish(frames.unpack(refusal("run")[4:]))
    with pytest.raises(AuthError, match="no known reason"):
        ours.finish({"refused": "<script>"})


@pytest.mark.parametrize("hello", [None, 7, {}, {"version": 1}, {"version": True, "nonce": b"x"}, [1]])
def test_a_greeting_of_the_wrong_form_is_a_wire_error(hello):
    with pytest.raises(WireError):
        ServerSide("t" * 64, "r").challenge(hello)


def test_errors_travel_by_a_fixed_table_of_names():
    lost = calls.error_answer(4, PeerLost("rank 1 died", remedy="look", peers=(1,)))
    with pytest.raises(PeerLost, match="rank 1 died") as caught:
        calls.read_answer(lost, 4)
    assert (caught.value.peers, caught.value.remedy) == ((1,), "look")
    for name in ("SystemExit", "os.system", "EchelonError", ""):
        with pytest.raises(EchelonError) as bare:
            calls.read_answer({"id": 4, "error": {"type": name, "message": "m"}}, 4)
        assert type(bare.value) is EchelonError
    with pytest.raises(WireError):
        calls.read_answer({"id": 5, "result": 1}, 4)


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path):
    path, secret = tmp_path / "token", token.make()
    assert len(secret) == 64
    token.write(path, secret)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.read(path) == secret
    path.chmod(0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        token.read(path)
    path.unlink()
    with pytest.raises(AuthError, match="cannot be read"):
        token.read(path)
    elsewhere = tmp_path / "elsewhere"
    os.symlink(elsewhere, path)
    token.write(path, secret)  # a planted link is replaced, not followed
    assert not elsewhere.exists()
    assert token.read(path) == secret
