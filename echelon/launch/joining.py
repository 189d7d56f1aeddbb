"""What `echelon join` does: finds the first host, shows the token, checks that both would run the same, gets a seat, works."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon import env, preload
from echelon import strategy as strategies
from echelon.clock import Deadline
from echelon.control import net
from echelon.control import token as tokens
from echelon.control.handshake import JOINER
from echelon.control.roster import SERVER, WORKER
from echelon.control.rpc import Client, Identity
from echelon.errors import AuthError, UsageError, WorldError
from echelon.launch import allocator, sameness
from echelon.launch.local import Job, make_plan
from echelon.launch.meeting import Me, meet
from echelon.launch.rundir import RunDir
from echelon.show.lines import fold, spell_ranks
from echelon.show.progress import Display

TRY_S = 6.0
"""How long one try to connect may take, before it is told and made again."""

PAUSE_S = 0.5
SAY_AGAIN_S = 30.0
CALL_S = 8.0
KEY_BITS = 62


def join(
    address: str, token_file: Path | None, workers: int | None, interface: str | None, timeout_s: float
) -> int:
    """Brings this host into the run at `address`; blocks until the run is over and gives its exit code."""
    deadline = Deadline.after(timeout_s)
    name = socket.gethostname().split(".")[0]
    display = Display(num_workers=1, host=name, own_prints=False)
    given = env.take_token()
    wire, token, there = _find(address, lambda: _token(token_file, given), deadline, display.say)
    try:
        me = Me(name, net.address_on(interface, there) if interface else net.local_address(there), workers)
        way = f"{me.address} on {net.interface_of(me.address)}"
        description = wire.call("describe", Deadline.after(CALL_S))
        job = _agree(wire, me, description)
        display.say(
            *fold(
                f"joined run {description['name']} of {description['host']} as {name} · {way} · waiting for all hosts"
            )
        )
        assembly = meet(wire, me, deadline)
    finally:
        wire.close()
    return _work(job, description, assembly.mine, token, net.spell(there, net.split(address)[1]), display)


def _work(
    job: Job, description: dict[str, Any], seat: Any, token: str, coordinator: str, display: Display
) -> int:
    from echelon.launch.joined import JoinedSupervisor

    folder = RunDir((env.runs_dir() / description["name"]).resolve(), owned=False)
    folder.logs.mkdir(parents=True, exist_ok=True)
    grace_s = float(description.get("grace_s", 30.0))
    chosen = strategies.merge(description.get("set_by_user", {}), {})
    imports, malloc = preload.imports(chosen), allocator.variables(env.everything())
    plan = make_plan(
        job, description["name"], folder.path, coordinator, grace_s, imports=imports, malloc=malloc
    ).seated(seat)
    ranks = " · ".join(
        f"{role}{'s' * (len(mine) != 1)} {spell_ranks(mine)} of {total}"
        for role, mine, total in (
            (WORKER, seat.ranks, plan.num_workers),
            (SERVER, seat.servers, plan.num_servers),
        )
        if mine
    )
    display.say(
        *fold(f"host {seat.index} of the run: {ranks} · {plan.threads_sentence} · logs in {folder.logs}")
    )
    return JoinedSupervisor(plan, folder, display, token, f"{description['host']}, {coordinator}").run()


def _find(
    address: str, token: Callable[[], str], deadline: Deadline, say: Callable[..., None]
) -> tuple[Client, str, str]:
    """A wire to the first host, the token and the first host's address in numbers. It may come up after this one:
    what stands in the way is told at once, and when it changes; tried until the deadline."""
    host, port = net.split(address)
    identity = Identity("", JOINER, 0, secrets.randbits(KEY_BITS) + 1)
    pause, told, again = threading.Event(), set[str](), Deadline.after(0)
    for turn in itertools.count():
        try:
            found = _facing(address, net.lookup(host))
            there, known = found[turn % len(found)], token()
            patience = deadline.sooner(TRY_S / len(found))
            return Client.connect(net.spell(there, port), known, identity, patience), known, there
        except (AuthError, _Loopback):
            raise
        except WorldError as error:  # no such name yet, nobody there yet, no token yet
            waiting = error
        if deadline.left_s <= PAUSE_S:
            raise WorldError(f"{waiting.message}, for as long as this host may wait", remedy=waiting.remedy)
        if waiting.message not in told or again.passed:
            told.add(waiting.message)
            again = Deadline.after(SAY_AGAIN_S)
            say(*fold(waiting.message), *(fold(f"  {waiting.remedy}") if waiting.remedy else ()),
                f"  trying again, for {deadline.left_s:.0f} s at most")  # fmt: skip
        pause.wait(PAUSE_S)
    raise AssertionError("not reached")


class _NotYet(WorldError):
    """The token's file is not there yet."""


class _Loopback(WorldError):
    """Waiting does not help: the name means this machine here."""


def _facing(address: str, found: list[str]) -> list[str]:
    """The addresses that are not this machine itself: they are tried in turn."""
    real = [one for one in found if not net.is_loopback(one)]
    if not real:
        raise _loopback(address, found[0])
    return real


def _loopback(address: str, there: str) -> _Loopback:
    return _Loopback(
        f"{address} is {there} here, on interface lo: that is this machine itself, not the first host",
        remedy="Give the first host's address in numbers, as it printed it, or correct the name in /etc/hosts.",
    )


def _token(file: Path | None, given: str | None) -> str:
    """From --token-file, else from the environment. A file that is not there yet is waited for."""
    if file is not None:
        if not file.exists():
            raise _NotYet(
                f"the token file {file} is not there yet", remedy="The first host writes it when it starts."
            )
        return tokens.read(file)
    if given:
        return given
    raise UsageError(
        "no token: the first host asks for the run's",
        remedy="Give its file with --token-file F (a copy of RUN_DIR/token, mode 0600), or ECHELON_TOKEN in the environment.",
    )


def _agree(wire: Client, me: Me, description: dict[str, Any]) -> Job:
    """The job, once this host is known to have the same script and program; otherwise both sides are told why not."""
    job = Job(
        description["script"],
        tuple(description["args"]),
        bool(description["module"]),
        description["num_workers"],
        int(description.get("num_servers", 0)),
    )
    folders = list(dict.fromkeys([Path.cwd(), Path(str(description["cwd"]))]))
    there = {folder: sameness.sha256(sameness.file_of(job, folder)) for folder in folders}
    why = sameness.objection(description, there, me.name)
    versions = description["version"], sameness.version()
    if all(versions) and versions[0] != versions[1]:
        why = f"{description['host']} has Echelon {versions[0]}, {me.name} has {versions[1]}"
    if int(description.get("num_hosts", 1)) < 2:
        raise WorldError(f"run {description['name']} is a run on one host",
                         remedy="Start it with --hosts H to let others join.")  # fmt: skip
    if why:
        wire.call("host.refuse", Deadline.after(CALL_S), name=me.name, address=me.address, reason=why)
        raise WorldError(
            why,
            remedy="Copy the script to the same place on every host, and start `echelon join` in its folder.",
        )
    os.chdir(next(folder for folder, digest in there.items() if digest == description["script_sha256"]))
    return job
