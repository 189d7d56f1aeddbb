"""Is the first host still there? Asked by further hosts, whose workers must not outlive it.

The first host's supervisor holds the coordinator's listening socket. So a connection that is refused means that this
supervisor is gone, and one that is made means that it is there, even while the coordinator is started again.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from echelon.control import net

QUIET_S = 1.5
"""The coordinator answers every half second; after so long without an answer it is looked for."""

GONE_S = 8.0
"""No answer and no connection for so long: the first host, or the way to it, is gone."""

PROBE_S = 2.0


def judge(silent_s: float, refused: int, reached: bool) -> str:
    """Why the first host counts as gone, "" while it does not. Pure.

    `refused` counts refusals in a row; `reached`: a connection was made since the last answer.
    """
    if refused >= 2:
        return "its supervisor ended (connections are refused)"
    if silent_s >= GONE_S and not reached:
        return f"no answer for {silent_s:.0f} s: it stopped, or the network between is cut"
    return ""


class Lifeline:
    """Looks in a thread of its own; `reason` is not empty once the first host is gone, and `wake` was called then."""

    def __init__(self, address: str, silent_s: Callable[[], float], wake: Callable[[], None]) -> None:
        self.reason = ""
        self._address, self._silent_s, self._wake = net.split(address), silent_s, wake
        self._over = threading.Event()
        threading.Thread(target=self._look, name="echelon-lifeline", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _look(self) -> None:
        refused, reached = 0, False
        while not self._over.wait(0.5):
            if self._silent_s() < QUIET_S:
                refused, reached = 0, False
                continue
            try:
                socket.create_connection(self._address, PROBE_S).close()
                refused, reached = 0, True
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                reached = False
            self.reason = judge(self._silent_s(), refused, reached)
            if self.reason:
                self._wake()
                return
