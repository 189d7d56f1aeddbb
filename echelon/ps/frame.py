"""What travels between a client and a parameter server, as bytes: pure, no sockets, no torch.

    4 bytes magic | u8 kind | 3 bytes 0 | u64 number of the call | u32 head bytes | u64 payload bytes | head (msgpack) | payload

    CALL      [verb, head, tensors, rooms]   client -> server   tensors: [dtype, shape, segment, offset]; rooms: [bytes, segment, offset]
    ANSWER    [head, tensors]                server -> client   tensors: as above; segment 0 or more: it lies in the client's room
    REFUSAL   {type, message, remedy, peers} server -> client   the error of one call
    SEGMENT   [bytes]                        client -> server   shared memory: its descriptor travels beside the frame
    WELCOME   {…}                            server -> client   the first frame: what the server is and what it allows
    BYE       [reason]                       both ways          the connection ends

Segment -1 means: in the payload, where tensors follow one another, each but the first at a multiple of 64 bytes. Nothing in a
head is believed: types, ranges and sums are checked here, and what is wrong is a WireError that ends its connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from echelon.control import frames
from echelon.errors import UsageError, WireError

MIB = 1 << 20
MAGIC = b"EPS\x01"
HEADER = struct.Struct("<4sB3xQIQ")
CALL, ANSWER, REFUSAL, SEGMENT, WELCOME, BYE = range(1, 7)
ALIGN = 64
INLINE = -1
MAX_DIMS = 32
MAX_DIM = 1 << 48

DTYPES: tuple[tuple[str, int], ...] = (
    ("float32", 4), ("float64", 8), ("float16", 2), ("bfloat16", 2), ("uint8", 1), ("int8", 1), ("int16", 2),
    ("int32", 4), ("int64", 8), ("bool", 1), ("complex64", 8), ("complex128", 16), ("uint16", 2), ("uint32", 4),
    ("uint64", 8), ("float8_e4m3fn", 1), ("float8_e5m2", 1),
)  # fmt: skip
"""Elements that can travel, with their bytes; a frame carries the place in this list."""

ITEM_BYTES = tuple(size for _, size in DTYPES)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one connection may cost."""

    head_bytes: int = 4 * MIB
    """Of one frame: names and numbers, no tensors."""

    payload_bytes: int = 2048 * MIB
    """Of one frame, beside what lies in shared memory."""

    in_flight_bytes: int = 2048 * MIB
    """Payloads and answers over the socket that are not done; beyond it the client's call() waits, and a client that does not is not read."""

    in_flight_calls: int = 4096
    """Calls without an answer; as above."""

    segments: int = 1024
    """Pieces of shared memory."""

    stall_s: float = 60.0
    """A frame that has begun must move on within this, in both directions, or the connection is ended."""

    strangers: int = 64
    """Connections of a host that have not proved the token yet; further ones are closed at once."""

    handshake_s: float = 0.9
    """And how long each of them may take."""


TRAINING = Limits(
    payload_bytes=1 << 36, in_flight_bytes=1 << 40, in_flight_calls=1 << 20, head_bytes=64 * MIB
)
"""Between a run's workers and its servers: pushes stay unanswered until their step, so all of a model may be under way."""


class Header(NamedTuple):
    kind: int
    call: int
    head_bytes: int
    payload_bytes: int


class At(NamedTuple):
    """A tensor of a frame. `segment` INLINE: in the payload, at `offset`."""

    dtype: int
    shape: list[int]
    num_bytes: int
    segment: int
    offset: int


class Room(NamedTuple):
    """Where the client wants one tensor of the answer. `segment` INLINE: over the socket."""

    num_bytes: int
    segment: int
    offset: int


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def pack(kind: int, call: int, head: Any, payload_bytes: int = 0) -> bytes:
    """Header and head. UsageError for a head that cannot travel."""
    try:
        data = msgpack.packb(head)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"this head cannot travel to a parameter server: {error}",
            remedy="It may hold None, bool, int of 64 bits, float, str, bytes, list and dict.",
        ) from None
    return HEADER.pack(MAGIC, kind, call, len(data), payload_bytes) + bytes(data)


def header(data: bytes | memoryview, limits: Limits) -> Header:
    """What follows; WireError before any of it is read when it is too much or not ours."""
    magic, kind, call, head_bytes, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC or not CALL <= kind <= BYE:
        raise WireError("what came is no frame of a parameter server")
    if head_bytes > limits.head_bytes or payload_bytes > limits.payload_bytes:
        raise WireError(
            f"a frame with a head of {head_bytes} and a payload of {payload_bytes} bytes is announced, at most "
            f"{limits.head_bytes} and {limits.payload_bytes} are taken"
        )
    return Header(kind, call, head_bytes, payload_bytes)


def unpack(data: bytes | memoryview) -> Any:
    """The value of a head: no extension types, lists bounded by the head's own length; WireError otherwise."""
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_ext_len=0, ext_hook=_refuse, max_array_len=frames.MAX_ITEMS,
            max_map_len=frames.MAX_ITEMS,
        )  # fmt: skip
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
        msgpack.UnpackException,
    ) as error:
        raise WireError(f"a head does not hold msgpack of ours ({type(error).__name__})") from None


def read_call(value: Any, payload_bytes: int) -> tuple[str, dict[str, Any], list[At], list[Room]]:
    if type(value) is not list or len(value) != 4:
        raise WireError("a call is [verb, head, tensors, rooms]")
    verb, head, tensors, rooms = value
    if type(verb) is not str or len(verb) > 200 or type(head) is not dict or type(rooms) is not list:
        raise WireError("a call of the wrong form")
    return verb, head, read_tensors(tensors, payload_bytes), [_room(room) for room in rooms]


def read_answer(value: Any, payload_bytes: int) -> tuple[dict[str, Any], list[At]]:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not dict:
        raise WireError("an answer is [head, tensors]")
    return value[0], read_tensors(value[1], payload_bytes)


def read_tensors(told: Any, payload_bytes: int) -> list[At]:
    """The tensors of a frame, those in the payload with their place in it; together they are exactly the payload."""
    if type(told) is not list:
        raise WireError("tensors of the wrong form")
    found, end = [], 0
    for entry in told:
        if type(entry) is not list or len(entry) != 4 or type(entry[1]) is not list:
            raise WireError("a tensor is [dtype, shape, segment, offset]")
        dtype, shape, segment, offset = entry
        num_bytes = _num_bytes(dtype, shape)
        if type(segment) is not int or type(offset) is not int or segment < INLINE or offset < 0:
            raise WireError("a tensor at no place")
        if segment == INLINE:
            offset = aligned(end)
            end = offset + num_bytes
        found.append(At(dtype, shape, num_bytes, segment, offset))
    if end != payload_bytes:
        raise WireError(f"a payload of {payload_bytes} bytes came with tensors of {end}")
    return found


def _num_bytes(dtype: Any, shape: list[Any]) -> int:
    if type(dtype) is not int or not 0 <= dtype < len(ITEM_BYTES) or len(shape) > MAX_DIMS:
        raise WireError("a tensor of no known type, or of too many dimensions")
    size = ITEM_BYTES[dtype]
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise WireError("a tensor with an impossible shape")
        size *= dim
        if size > MAX_DIM:
            raise WireError("a tensor larger than any memory")
    return size


def _room(told: Any) -> Room:
    if type(told) is not list or len(told) != 3 or any(type(number) is not int for number in told):
        raise WireError("room is [bytes, segment, offset]")
    room = Room(*told)
    if not 0 <= room.num_bytes <= MAX_DIM or room.segment < INLINE or room.offset < 0:
        raise WireError("room at no place")
    return room


def placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes lie in a payload, and how long that is."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(aligned(end))
        end = offsets[-1] + size
    return offsets, end


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
