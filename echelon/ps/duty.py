"""What the process of a parameter server does, from its seat to the end of the run: the wiring point of the server's side.

The process has joined and beats before `serve` is called. It stays until the first host's supervisor says, through the run's
table, that servers are needed no more: the workers may still read from it while they save and leave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.control.roster import OVER
from echelon.control.rpc import Client, Unreached
from echelon.env import Place
from echelon.errors import AuthError, WorldError
from echelon.events import Serving
from echelon.ps.pace import Pace

if TYPE_CHECKING:
    from echelon.ps.dealing import Dealing
    from echelon.ps.host import Host
    from echelon.ps.local import Local
    from echelon.ps.service import Service
    from echelon.ps.session import Training

POLL_S = 5.0
"""How long one question for the end may take; the answer comes within milliseconds of it."""

CALL_S = 10.0
CLOSE_S = 5.0
PAUSE_S = 0.2
GONE_S = 60.0
"""Without a coordinator for so long, there is no run any more."""

NEVER = 1 << 53
"""A term that does not come: what becomes of others does not end our question."""


def serve(member: Member, place: Place) -> int:
    """Serves until the run is over; gives the exit code. Blocks. Raises WorldError when the run's coordinator is gone."""
    import torch

    from echelon.native import threads
    from echelon.ps import copies, dealing, judge, local, noting, parts, session
    from echelon.ps.frame import TRAINING
    from echelon.ps.host import Host
    from echelon.ps.site import RunSite

    threads.use(torch.get_num_threads())  # the launcher's number
    num_servers = int(member.description.get("num_servers", 1))
    held = copies.Copies(place.rank, place.world_size, num_servers, leads=place.incarnation == 0)
    training = session.Training(place.world_size, held, RunSite(member))
    services: dict[str, Service] = {session.NAME: training, copies.NAME: copies.Copying(held)}
    notes = noting.Noted(training, member)
    services[dealing.NAME] = deals = dealing.Dealing(place.world_size, notes)
    services[parts.NAME] = parts.Parts(training, held)
    services[judge.NAME] = judge.Judge(num_servers, training.reporter.verdicts if training.reporter else None)
    services[local.NAME] = apart = local.Local(place.world_size)
    host = Host(services, member.token, place.run, place.address or "127.0.0.1", limits=TRAINING)
    host.start()
    try:
        key, value = address_key(place.rank), host.address.encode()
        member.report = partial(_sign, training, apart, deals, host, Pace())
        member.call("store.set", Deadline.after(CALL_S), key=key, value=value)
        wait_until_over(member)
    finally:
        notes.close()
        training.close()
        host.close(Deadline.after(CLOSE_S))
    return 0


def _sign(training: Training, apart: Local, deals: Dealing, host: Host, pace: Pace) -> Serving:
    counters, stale = host.counters, training.stale()
    updates = training.updates + apart.updates
    return Serving(
        doing="serving", updates=updates, sums=training.sums, bytes_in=counters.bytes_in, bytes_out=counters.bytes_out,
        stale=[stale.p50, stale.p99, stale.max] if stale.total else [], behind=stale.classes(),
        busy_s=pace.look(time.monotonic(), updates + training.sums), dropped=deals.dropped, returned=deals.returned,
        skipped=training.skipped(), samples={str(rank): count for rank, count in deals.samples.items()},
    )  # fmt: skip


def address_key(rank: int) -> str:
    """Where the run's table has the address of a server."""
    return f"ps/server/{rank}"


def wait_until_over(member: Member, tick: Callable[[], None] | None = None) -> None:
    """Blocks until the run needs no servers; `tick` is called at least every POLL_S. A coordinator that is started again
    meanwhile is found again; WorldError when there is none for GONE_S."""
    wire = Client(member.place.coordinator, member.token, member.identity)
    pause, heard = threading.Event(), Deadline.after(GONE_S)
    while not heard.passed:
        if tick is not None:
            tick()
        try:
            wire.call("store.get", Deadline.after(POLL_S + CALL_S), key=OVER, timeout_s=POLL_S, term=NEVER)
            wire.close()
            return
        except Unreached:
            pause.wait(PAUSE_S)
        except AuthError:
            raise
        except WorldError:  # not yet
            heard = Deadline.after(GONE_S)
    raise WorldError(
        f"the run's coordinator did not answer for {GONE_S:g} s, so this server ends",
        remedy="The run's supervisor starts it again when it ends: look at logs/coordinator-0.log.",
    )
