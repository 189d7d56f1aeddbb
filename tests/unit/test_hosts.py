"""Several hosts, the pure parts: order, dealing, who is lost, what addresses mean, what is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from echelon.clock import FakeClock
from echelon.control import handshake, token
from echelon.control.handshake import JOINER, ClientSide, Identity, Refused, ServerSide
from echelon.elastic import hosts
from echelon.elastic.hosts import Host, Signs
from echelon.errors import AuthError, EchelonError, UsageError, WorldError
from echelon.events import Event, HostAsked, HostLost, Knocked, Printed
from echelon.launch import crew, lifeline, listen, meeting, sameness
from echelon.launch.forward import BURST, Forward
from echelon.launch.local import Job
from echelon.launch.start import invitation
from echelon.show.lines import Line


@pytest.mark.case("workers dealt over hosts")
@pytest.mark.parametrize(
    ("total", "asked", "shares"),
    [
        (4, [None, None], [2, 2]),
        (5, [None, None], [3, 2]),
        (7, [None, None, None], [3, 2, 2]),
        (8, [None, 6], [2, 6]),
        (8, [None, 2, None], [3, 2, 3]),
        (2, [None, None], [1, 1]),
    ],
)
def test_workers_are_dealt_evenly_over_those_who_did_not_say(total, asked, shares):
    assert hosts.deal(total, asked) == shares


@pytest.mark.parametrize(
    ("total", "asked"), [(2, [None, 2]), (1, [None, None]), (4, [None, 3, None]), (3, [None, 5])]
)
def test_numbers_that_leave_a_host_without_work_are_an_error(total, asked):
    with pytest.raises(WorldError, match=f"{total} workers cannot be dealt"):
        hosts.deal(total, asked)


@pytest.mark.case("hosts in order")
def test_the_first_host_is_first_and_the_others_follow_by_address():
    there = [
        Host(7, "c", "10.0.0.10"),
        Host(9, "b", "10.0.0.9"),
        Host(3, "d", "fd00::1"),
        Host(0, "z", "10.0.0.200"),
    ]
    assert [host.name for host in hosts.order(there)] == ["z", "b", "c", "d"]
    seats = hosts.seats(6, there)
    assert [(seat.index, seat.name, list(seat.ranks)) for seat in seats] == [
        (0, "z", [0, 1]), (1, "b", [2, 3]), (2, "c", [4]), (3, "d", [5]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sign", "lost"),
    [
        (Signs(seen=100.0, connections=3), False),
        (Signs(seen=90.5, connections=3), False),
        (Signs(seen=89.9, connections=3), True),
        (Signs(seen=100.0, connections=0, hung_up=99.5), False),
        (Signs(seen=99.9, connections=0, hung_up=98.9), True),
    ],
)
def test_a_host_is_lost_when_it_is_silent_or_hung_up_for_too_long(sign, lost):
    assert bool(hosts.lost(100.0, {1: sign})) is lost


@pytest.mark.parametrize(
    ("silent_s", "refused", "reached", "gone"),
    [
        (2.0, 0, False, False),
        (2.0, 1, False, False),
        (2.0, 2, False, True),
        (8.0, 0, False, True),
        (60.0, 0, True, False),
    ],
)
def test_the_first_host_is_gone_when_it_refuses_or_cannot_be_reached(silent_s, refused, reached, gone):
    assert bool(lifeline.judge(silent_s, refused, reached)) is gone


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10.0.0.1", ("10.0.0.1", 0)), ("10.0.0.1:29400", ("10.0.0.1", 29400)), ("node1", ("node1", 0)),
        ("node1:5", ("node1", 5)), ("[fd00::1]:29400", ("fd00::1", 29400)), ("[fd00::1]", ("fd00::1", 0)),
        ("fd00::1", ("fd00::1", 0)),
    ],
)  # fmt: skip
def test_listen_takes_names_and_addresses_with_and_without_a_port(text, parsed):
    assert listen.parse(text) == parsed


@pytest.mark.parametrize(
    "text", ["", ":1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "a:b", "[fd00::1", "[fd00::1]x"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="is not an address"):
        listen.parse(text)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("127.0.0.1", WorldError, "only this machine reaches it"),
        ("localhost:80", WorldError, "only this machine reaches it"),
        (str.join(".", "0000"), UsageError, "every interface"),
        ("::", UsageError, "every interface"),
        ("no.such.name.invalid", WorldError, "has no address"),
    ],
)
def test_several_hosts_listen_only_where_others_reach_them(text, error, words):
    with pytest.raises(error, match=words):
        listen.choose(text, 2)


def test_one_host_listens_on_loopback():
    assert listen.choose(None, 1) == ("127.0.0.1", 0)


def greet(client: ClientSide, server: ServerSide) -> None:
    from echelon.control import frames

    def body(frame: bytes) -> object:
        return frames.unpack(frame[frames.LENGTH.size :])

    session, proof = server.finish(body(client.prove(body(server.challenge(body(client.hello()))))))
    assert client.finish(body(proof)) == session


def test_a_joiner_need_not_know_the_runs_name_but_everybody_else_must():
    secret = "t" * 64
    greet(ClientSide(secret, Identity("", JOINER, 0, 77)), ServerSide(secret, "it"))
    greet(ClientSide(secret, Identity("it", JOINER, 0, 77)), ServerSide(secret, "it"))
    for identity in (
        Identity("other", JOINER, 0, 1),
        *(Identity("", role, 0) for role in handshake.ROLES - {JOINER}),
    ):
        with pytest.raises(Refused, match="another run"):
            greet(ClientSide(secret, identity), ServerSide(secret, "it"))
    with pytest.raises(Refused, match="token"):
        greet(ClientSide("u" * 64, Identity("", JOINER, 0, 77)), ServerSide(secret, "it"))


def test_scripts_are_compared_by_content(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "pack").mkdir()
    for path in ("train.py", "a/train.py", "pack/__init__.py", "pack/__main__.py", "pack/inner.py"):
        (tmp_path / path).write_text(f"print('{path}')")
    job = Job("train.py")
    one, two = (sameness.sha256(sameness.file_of(job, folder)) for folder in (tmp_path, tmp_path / "a"))
    assert one != two
    assert sameness.sha256(sameness.file_of(job, tmp_path / "nowhere")) == ""
    assert sameness.file_of(Job("pack", module=True), tmp_path) == tmp_path / "pack" / "__main__.py"
    assert sameness.file_of(Job("pack.inner", module=True), tmp_path) == tmp_path / "pack" / "inner.py"
    assert sameness.file_of(Job("pack.other", module=True), tmp_path) is None
    run = {"host": "h0", "script": "train.py", "script_sha256": one}
    assert sameness.objection(run, {Path("x"): two, Path("y"): one}, "h1") == ""
    told = sameness.objection(run, {Path("x"): two}, "h1")
    assert two[:16] in told
    assert one[:16] in told
    assert "is not on h1 in x or y" in sameness.objection(run, {Path("x"): "", Path("y"): ""}, "h1")


def test_the_invitation_names_the_command_and_never_the_token(tmp_path):
    lines = invitation("10.0.0.1:29400", "eth0", tmp_path / "token", given=False)
    assert f"  echelon join 10.0.0.1:29400 --token-file {tmp_path}/token" in lines
    assert any("0600" in line for line in lines)
    assert any("ask for nothing" in line for line in lines)
    assert "  ECHELON_TOKEN must be set there as it is here." in invitation(
        "h:1", "eth0", tmp_path, given=True
    )


def test_who_is_missing_is_counted_and_who_came_is_named():
    error: EchelonError = meeting.missing([Host(0, "h0", "10.0.0.1")], 3)
    assert "2 of 3 hosts did not come in time; those that did: h0 (10.0.0.1)" in str(error)


def test_a_line_flood_is_cut_and_counted():
    clock, sent, seen = FakeClock(), list[Printed](), list[Line]()

    class Here:
        def lines(self, lines):
            seen.extend(lines)

    forward = Forward(Here(), sent.append, "h1", 1, clock)
    forward.lines([Line("out", (3,), f"line {i}") for i in range(1000)])
    assert (len(seen), len(sent)) == (1000, int(BURST))
    clock.advance(1.0)
    forward.lines([Line("err", (3,), "after")])
    assert [event.text for event in sent[-2:]] == ["… 600 more lines, in its log on h1", "after"]


@pytest.mark.parametrize(
    ("event", "code", "words"),
    [
        (HostLost(host="h1", address="a", index=1, ranks=[2, 3], reason="why"), 137, "host h1 (a) is gone, and workers 2-3 with it: why"),
        (HostAsked(host="h1", code=130, reason="stopped by Ctrl-C"), 130, "stopped by Ctrl-C on h1"),
    ],
)  # fmt: skip
def test_what_another_host_tells_may_end_the_run(event: Event, code: int, words: str):
    stop = crew._reason(event)
    assert stop is not None
    assert (stop.code, stop.reason) == (code, words)
    assert crew._reason(Knocked(address="a", why="token")) is None
    assert crew.sentence(Knocked(address="a", why="token")) == "a was refused: it came with a wrong token"


def test_records_of_hosts_travel_whole():
    host = Host(3, "h", "10.0.0.1", 2, 99)
    assert Host(**dataclasses.asdict(host)) == host


def test_a_short_token_is_refused():
    with pytest.raises(AuthError, match="has 5 characters"):
        token.check("short")
    assert token.check("0123456789abcdef") == "0123456789abcdef"
