"""What comes over one connection, read in large pieces."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable

from echelon.errors import WireError
from echelon.ps.frame import HEADER, Header, Limits, header

HELD_BYTES = 256 * 1024
LOOK_S = 1
"""How often a socket that does not move is looked at."""

MAX_FDS = 8


class Stalled(OSError):
    """The other side began something and does not go on with it."""


def prepare(wire: socket.socket) -> None:
    """A connected socket as both ends use it: blocking, looked at every second, answers at once."""
    wire.settimeout(None)
    patience = struct.pack("ll", LOOK_S, 0)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    if wire.family != socket.AF_UNIX:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(
            OSError
        ):  # several flows meet in a server's link, and BBR's probing leaves gaps
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        for option, seconds in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4)):
            wire.setsockopt(socket.IPPROTO_TCP, option, seconds)


class Inbox:
    """What comes, read in large pieces; large payloads go straight to where they belong. One thread reads.

    `idle()` is called before a read that may wait. With `takes_fds`, descriptors that come along are kept until claim_fd().
    """

    def __init__(
        self,
        wire: socket.socket,
        limits: Limits,
        idle: Callable[[], None] | None = None,
        *,
        takes_fds: bool = False,
    ) -> None:
        self._wire, self._limits, self._idle, self._takes_fds = wire, limits, idle, takes_fds
        self._held = memoryview(bytearray(HELD_BYTES))
        self._begin = self._end = 0
        self._fds: list[int] = []
        self.num_bytes = 0

    @property
    def has_more(self) -> bool:
        """Another frame, or some of it, is here already."""
        return self._end > self._begin

    def header(self) -> Header | None:
        """The next frame's; None when the other side hung up between two frames."""
        if self._end - self._begin < HEADER.size and not self._fill(
            HEADER.size, clean=self._end == self._begin
        ):
            return None
        at, self._begin = self._begin, self._begin + HEADER.size
        return header(self._held[at : self._begin], self._limits)

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes; valid until the next read."""
        if num_bytes > HELD_BYTES:
            data = memoryview(bytearray(num_bytes))
            self.into(data)
            return data
        if self._end - self._begin < num_bytes:
            self._fill(num_bytes)
        at, self._begin = self._begin, self._begin + num_bytes
        return self._held[at : self._begin]

    def into(self, where: memoryview) -> None:
        """Fills `where`."""
        have = min(len(where), self._end - self._begin)
        where[:have] = self._held[self._begin : self._begin + have]
        self._begin += have
        while have < len(where):
            if len(where) - have <= HELD_BYTES // 4:
                self._fill(len(where) - have)
                where[have:] = self.take(len(where) - have)
                return
            have += self._read(where[have:], mid_frame=True, fds=False, flags=socket.MSG_WAITALL)

    def skip(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(self.take(min(num_bytes, HELD_BYTES)))

    def claim_fd(self) -> int:
        """The descriptor that came with this frame."""
        if not self._fds:
            raise WireError("shared memory was told of, and no descriptor came with it")
        return self._fds.pop(0)

    def close(self) -> None:
        """Closes descriptors that nobody claimed."""
        while self._fds:
            os.close(self._fds.pop())

    def _fill(self, num_bytes: int, clean: bool = False) -> bool:
        """Holds at least so many bytes. False when there are none and will be none, and that is `clean`."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + num_bytes > HELD_BYTES:
            left = self._end - self._begin
            self._held[:left] = bytes(self._held[self._begin : self._end])
            self._begin, self._end = 0, left
        while self._end - self._begin < num_bytes:
            try:
                self._end += self._read(
                    self._held[self._end :],
                    mid_frame=not clean or self._end > self._begin,
                    fds=self._takes_fds,
                )
            except EOFError:
                if clean and self._begin == self._end:
                    return False
                raise ConnectionError("it was closed in the middle of a frame") from None
        return True

    def _read(self, where: memoryview, *, mid_frame: bool, fds: bool, flags: int = 0) -> int:
        if self._idle is not None:
            self._idle()
        since = time.monotonic()
        while True:
            try:
                # one call for as much as belongs here: not one, and one change of threads, for each packet
                count = self._receive(where) if fds else self._wire.recv_into(where, 0, flags)
            except BlockingIOError:
                if mid_frame and time.monotonic() - since > self._limits.stall_s:
                    raise Stalled(
                        f"it began a frame and sent nothing more for {self._limits.stall_s:g} s"
                    ) from None
                continue
            if not count:
                raise EOFError
            self.num_bytes += count
            return count

    def _receive(self, where: memoryview) -> int:
        count, extra, flags, _ = self._wire.recvmsg_into(
            [where], socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._fds += found
        if len(self._fds) > MAX_FDS or flags & socket.MSG_CTRUNC:
            raise WireError("more descriptors came than anything here needs")
        return count
