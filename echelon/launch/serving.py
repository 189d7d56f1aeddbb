"""The main of one server of `echelon serve`: hosts tables until its standard input ends."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys

from echelon.clock import Deadline
from echelon.errors import EchelonError

TELL_S = 1.0
CLOSE_S = 3.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent decides
    told = json.loads(
        sys.stdin.buffer.raw.readline() if hasattr(sys.stdin.buffer, "raw") else sys.stdin.readline()
    )

    import torch  # here, so that the launcher's side of this package stays light

    from echelon.launch.serve import stats_line
    from echelon.native import threads
    from echelon.ps.client import SERVE
    from echelon.ps.host import Host
    from echelon.ps.tables import Tables

    torch.set_num_threads(1)  # a thread a client, and the core's own, do the work
    threads.use(told["threads"])
    tables = Tables()
    try:
        host = Host({"tables": tables}, told["token"], SERVE, told["bind"], port=told["port"])
    except EchelonError as error:
        print(f"echelon serve: {error}", file=sys.stderr)
        return error.exit_code
    host.start()
    _say(json.dumps({"address": host.where.plain}).encode() + b"\n")
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while not ready.select(TELL_S) or os.read(sys.stdin.fileno(), 4096):
            _say(
                stats_line(
                    tables=tables.num_tables, bytes=tables.num_bytes, clients=host.counters.connections, updates=tables.num_updates,
                )
            )  # fmt: skip
    host.close(Deadline.after(CLOSE_S))
    return 0


def _say(line: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: the input ends next
        os.write(1, line)


if __name__ == "__main__":
    sys.exit(main())
