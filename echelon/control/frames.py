"""What a frame is: pure bytes in, bytes out; no sockets.

Before authentication:  u32 length | msgpack                                (at most 4 KiB)
After it:               u32 length | u64 counter | 16 bytes MAC | msgpack   (at most 16 MiB)

`length` counts what follows it. Each direction has its own key and its own counter from 0, so a frame that was
changed, repeated, left out, reordered or sent back does not open: WireError, and the connection is over.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import msgpack

from echelon.errors import UsageError, WireError

LENGTH = struct.Struct(">I")
COUNTER = struct.Struct(">Q")
MAC_BYTES = 16
SEAL_BYTES = COUNTER.size + MAC_BYTES

MAX_HELLO_BYTES = 4096
"""Nobody who has not proved the token may make us hold more than this."""

MAX_FRAME_BYTES = 16 << 20
"""Counts counter, MAC and payload."""

MAX_ITEMS = 1 << 16
"""Entries of one list or map, so that a short frame cannot claim a long list."""

MAX_DEPTH = 32
"""Lists and maps inside each other, so that no walk over a value recurses far."""


def pack(value: Any) -> bytes:
    """None, bool, int, float, str, bytes, list and dict as msgpack; UsageError for anything else."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"a {type(value).__name__} cannot travel over the control wire: {error}",
            remedy="Send None, bool, int of 64 bits, float, str, bytes, list and dict.",
        ) from None


def unpack(data: bytes) -> Any:
    """The value in `data`: one value, string keys only, no extension types, no time stamps, bounded; else WireError."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
        msgpack.UnpackException,
    ) as error:
        raise WireError(f"a frame does not hold msgpack of ours ({type(error).__name__})") from None
    _check(value, MAX_DEPTH)
    return value


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _check(value: Any, depth: int) -> None:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise WireError("a map has a key that is not a string")
        inner: Any = value.values()
    elif isinstance(value, list):
        inner = value
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        return
    else:
        raise WireError(f"a frame holds a {type(value).__name__}")
    if depth == 0:
        raise WireError(f"lists and maps are more than {MAX_DEPTH} deep")
    for item in inner:
        _check(item, depth - 1)


def hello(value: Any) -> bytes:
    """An unauthenticated frame with its length."""
    payload = pack(value)
    if len(payload) > MAX_HELLO_BYTES:
        raise UsageError(f"a greeting of {len(payload)} bytes is over {MAX_HELLO_BYTES}; names must be short")
    return LENGTH.pack(len(payload)) + payload


def length_of(header: bytes, limit: int) -> int:
    """How many bytes follow; WireError when that is nothing or over `limit`, before any of it is read."""
    (length,) = LENGTH.unpack(header)
    if not 0 < length <= limit:
        raise WireError(f"a frame of {length} bytes is announced, at most {limit} are taken")
    return int(length)


class Sealer:
    """Makes the frames of one direction. Owned by one connection; not thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.counter = 0

    def seal(self, value: Any) -> bytes:
        """The whole frame, length included. UsageError, and no frame used up, when it would be too long."""
        payload = pack(value)
        length = SEAL_BYTES + len(payload)
        if length > MAX_FRAME_BYTES:
            raise UsageError(
                f"a message of {length >> 20} MiB is over the {MAX_FRAME_BYTES >> 20} MiB of the control wire",
                remedy="The control wire is for small things: send tensors through a Group.",
            )
        counter = COUNTER.pack(self.counter)
        self.counter += 1
        return LENGTH.pack(length) + counter + _mac(self._key, counter, payload) + payload


class Opener:
    """Opens the frames of one direction, in order. After a WireError the connection must be closed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.counter = 0

    def open(self, body: bytes) -> Any:
        """The value of a frame, given what followed its length. Nothing in it is looked at before the MAC was right."""
        if len(body) < SEAL_BYTES:
            raise WireError(f"a frame of {len(body)} bytes is too short to be sealed")
        counter, mac, payload = body[: COUNTER.size], body[COUNTER.size : SEAL_BYTES], body[SEAL_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, counter, payload)):
            raise WireError("a frame was changed on its way, or is not from this connection (wrong MAC)")
        (number,) = COUNTER.unpack(counter)
        if number != self.counter:
            raise WireError(f"frame {number} came where frame {self.counter} was due")
        self.counter += 1
        return unpack(payload)


def _mac(key: bytes, counter: bytes, payload: bytes) -> bytes:
    mac = hmac.new(key, counter, hashlib.sha256)
    mac.update(payload)
    return mac.digest()[:MAC_BYTES]
