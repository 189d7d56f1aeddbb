"""Servers among the workers, the pure parts: seats, shares of hosts, who is blamed, who holds up the run, what is typed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.activity import ANYBODY, Wait
from echelon.clock import FakeClock
from echelon.control.roster import Who
from echelon.elastic import hosts, membership
from echelon.elastic.history import said_by
from echelon.elastic.hosts import Host
from echelon.elastic.lookout import Lookout
from echelon.elastic.membership import Change, Membership
from echelon.elastic.stuck import decide
from echelon.elastic.views import Options, View
from echelon.errors import UsageError, WorldError
from echelon.events import Beat, Failed, HostLost, Left, Serving, Stuck, Unstuck, Warned
from echelon.launch import crew, restart
from echelon.launch.blame import Exit, judge
from echelon.launch.ends import Ends
from echelon.launch.local import Job, server_threads, strategy_options, thread_plan
from echelon.show.ended import failure_block
from echelon.show.progress import starting_line
from echelon.show.state import Progress

# seats


def with_servers() -> Membership:
    now = Membership(2, num_servers=2)
    for role in ("worker", "server"):
        for rank in range(2):
            now = after(now, membership.join(now, rank, "h", 100 + rank, 0, role))
    return now


def after(now: Membership, change: Change | None) -> Membership:
    assert change is not None
    return membership.apply(now, change)


@pytest.mark.case("a server's seat is its own")
def test_worker_0_and_server_0_are_two():
    now = with_servers()
    assert (now.term, sorted(now.seats), sorted(now.servers)) == (1, [0, 1], [0, 1])
    now = after(now, membership.died(now, 0, 137, 7, "server"))
    assert now.term == 2
    assert (now.seats[0].state, now.servers[0].state) == ("joined", "dead")
    assert now.servers[0].reason == "server 0 on h (pid 100) ended without a word (signal 9)"
    assert (now.lost_since(1), now.servers_lost_since(1)) == ((), (0,))
    assert (now.awaited, now.ended) == (frozenset({0, 1}), frozenset())


def test_a_server_that_is_started_again_takes_its_old_seat_in_a_new_term():
    now = with_servers()
    now = after(now, membership.died(now, 1, 137, 0, "server"))
    now = after(now, membership.join(now, 1, "h", 300, 1, "server"))
    assert (now.term, now.servers[1].state, now.servers[1].incarnation) == (3, "joined", 1)
    assert now.servers_lost_since(1) == ()
    with pytest.raises(UsageError, match="incarnation 0 of server 1 was replaced by 1"):
        membership.join(now, 1, "h", 101, 0, "server")


def test_servers_that_are_not_there_are_refused():
    for change in (membership.join, membership.died):
        with pytest.raises(UsageError, match=r"server 2 .* a run of 2 servers"):
            change(with_servers(), 2, *(("h", 1, 0) if change is membership.join else (1, 0)), "server")
    with pytest.raises(UsageError, match="a run of 0 servers"):
        membership.join(Membership(2), 0, "h", 1, 0, "server")


def test_the_journal_keeps_the_role_and_older_lines_are_workers():
    change = membership.join(Membership(1, num_servers=1), 0, "h", 1, 0, "server")
    assert membership.read_change(change.to_dict()) == change
    old = {key: value for key, value in change.to_dict().items() if key != "role"}
    assert membership.read_change(old).role == "worker"


@pytest.mark.case("who speaks for whom")
def test_a_server_never_speaks_as_a_worker_nor_a_worker_as_a_server():
    def said(role, event):
        return said_by(role, 1, event.to_dict())

    assert said("worker", Beat(rank=7)).rank == 1
    assert said("server", Serving(rank=7, doing="serving")).rank == 1
    assert said("server", Beat(rank=0)) is None
    assert said("server", Left(rank=0, step=1)) is None
    assert said("worker", Serving(rank=0)) is None
    assert said("server", Warned(rank=0, message="m")).rank is None
    failed = Failed(rank=0, host="h", step=0, code=1, error="e", traceback="")
    assert (said("server", failed).role, said("server", failed).rank) == ("server", 1)
    assert (said("worker", failed).role, said("worker", failed).rank) == ("worker", 1)
    assert said("supervisor", Beat(rank=7)).rank == 7


# hosts


@pytest.mark.case("servers dealt over hosts")
@pytest.mark.parametrize(
    ("total", "workers", "shares"),
    [
        (2, [1, 1], [1, 1]),
        (3, [1, 1], [2, 1]),
        (1, [4, 1, 1], [1, 0, 0]),
        (0, [1, 1], [0, 0]),
        (2, [1, 0, 1, 0], [0, 1, 0, 1]),
        (3, [2, 0, 2, 0], [0, 2, 0, 1]),
    ],
)
def test_servers_are_dealt_over_hosts_without_workers_first_and_evenly(total, workers, shares):
    assert hosts.deal_servers(total, workers) == shares


@pytest.mark.parametrize(("total", "num_hosts"), [(2, 2), (3, 2), (1, 3), (0, 2), (7, 3)])
def test_a_host_holds_the_servers_that_it_was_dealt(total, num_hosts):
    there = [Host(index, f"h{index}", f"10.0.0.{index + 1}") for index in range(num_hosts)]
    seats = hosts.seats(num_hosts, there, total)
    assert [rank for seat in seats for rank in seat.servers] == list(range(total))
    assert [seat.holds(Who("server", 0)) for seat in seats] == [total > 0, *[False] * (num_hosts - 1)]
    assert all(seat.holds(Who("worker", seat.index)) for seat in seats)


def test_hosts_that_ask_for_no_workers_get_the_servers():
    there = [Host(0, "h0", "10.0.0.1"), Host(1, "h1", "10.0.0.2", asked=0), Host(2, "h2", "10.0.0.3")]
    seats = hosts.seats(3, there, 2)
    assert [(list(seat.ranks), list(seat.servers)) for seat in seats] == [
        ([0, 1], []),
        ([], [0, 1]),
        ([2], []),
    ]
    assert crew.seats_line(seats).endswith("h1 (10.0.0.2) runs servers 0-1 · h2 (10.0.0.3) runs 2")


@pytest.mark.parametrize(("num_servers", "asked"), [(0, [None, 0]), (1, [None, 0, 0])])
def test_a_host_without_workers_needs_a_server(num_servers, asked):
    with pytest.raises(WorldError, match=r"and there (is 1 server|are 0 servers) to run there"):
        hosts.deal(4, asked, num_servers)


def test_a_lost_host_names_its_servers():
    lost = HostLost(host="h1", address="a", index=1, ranks=[1], servers=[1, 2], reason="cut")
    assert crew._reason(lost).reason == "host h1 (a) is gone, and worker 1 and servers 1-2 with it: cut"


# blame


def said(
    rank: int, time: float, error: str = "ValueError: x", *, role: str = "worker", consequence: bool = False
) -> Failed:
    return Failed(time=time, rank=rank, host="h", step=7, code=1, error=error, traceback="", consequence=consequence,
                  role=role)  # fmt: skip


@pytest.mark.case("a killed server is named")
@pytest.mark.parametrize(
    "error",
    [
        "PeerLost: server 1 is gone",
        "ConnectionResetError: [Errno 104]",
        "WireError: cut",
        "BrokenPipeError: x",
    ],
)
def test_a_killed_server_comes_before_workers_that_lost_it_even_if_they_spoke_first(error):
    ends = {0: Exit(0, 1, 4.0), 1: Exit(1, 1, 4.1)}
    verdict = judge(ends, [said(0, 3.9, error), said(1, 4.0, error)], {1: Exit(1, 137, 5.0, early=True)})
    assert (str(verdict.who), verdict.code, verdict.reason) == ("server 1", 137, "killed by SIGKILL")
    assert (verdict.consequences, verdict.also) == ((0, 1), ())
    block = failure_block(verdict, host="h", step=7, log=Path("l"), cause="", log_tail=[], style=False)
    assert block[1] == "server 1 on h was killed by SIGKILL (signal 9) at step 7"
    assert block[-1] == "2 workers failed as a consequence (0-1)"


def test_a_lost_connection_is_a_cause_while_every_server_is_there():
    verdict = judge(
        {0: Exit(0, 1, 4.0)}, [said(0, 3.9, "ConnectionResetError: x")], {1: Exit(1, 143, 5.0, ours=True)}
    )
    assert str(verdict.who) == "worker 0"


def test_a_worker_that_failed_by_itself_comes_before_a_server_that_ended_later():
    verdict = judge({0: Exit(0, 1, 4.0)}, [said(0, 3.9)], {0: Exit(0, 137, 5.0, early=True)})
    assert (str(verdict.who), verdict.consequences) == ("worker 0", ())


def test_a_server_that_raised_is_told_in_its_own_words():
    verdict = judge(
        {},
        [said(0, 1.0, "PeerLost: x", consequence=True), said(0, 2.0, role="server")],
        {0: Exit(0, 1, 2.1, early=True)},
    )
    assert (str(verdict.who), verdict.code, verdict.reason) == ("server 0", 1, "ValueError: x")


def test_a_server_that_leaves_too_early_is_a_failure_whatever_its_code():
    verdict = judge({}, [], {0: Exit(0, 0, 2.0, early=True)})
    assert (verdict.code, verdict.reason) == (1, "it ended (exit code 0) while it was still needed")
    assert judge({}, [], {0: Exit(0, 0, 2.0)}) is None


def test_the_end_waits_for_servers_only_in_good_order():
    ends = Ends()
    assert not ends.servers_left(0, range(2))
    assert not ends.servers_left(75, range(2))
    assert ends.servers_left(1, range(2))
    ends.put(Who("server", 0), Exit(0, 0, 1.0))
    ends.put(Who("server", 1), Exit(1, 0, 1.0))
    assert ends.servers_left(0, range(2))
    assert ends.servers_left(0, range(0))
    assert ends.everybody == {Who("server", 0), Who("server", 1)}
    ends.forget(Who("server", 1))
    assert ends.everybody == {Who("server", 0)}


@pytest.mark.parametrize(
    ("ends", "again"),
    [
        ([1.0], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], False),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 90.0], True),
    ],
)
def test_the_coordinator_is_started_again_within_a_budget(ends, again):
    assert isinstance(restart.coordinator(ends, 3), restart.Again) is again


def test_this_version_starts_no_worker_and_no_server_again():
    for role in ("worker", "server"):
        assert isinstance(restart.after_end(Who(role, 1), 137, 0, {"form": "ps"}), restart.GiveUp)


# stuck


def server(rank, still_s=500.0, **known):
    return View(
        rank=rank, role="server", host="vm", pid=200 + rank, doing="serving", still_s=still_s, **known
    )


def silent_server(rank, age_s=12.0, process="T"):
    return server(rank, beat_age_s=age_s, process=process, process_age_s=1.0)


def moving(rank, **known):
    return View(rank=rank, host="vm", pid=100 + rank, **({"step": 7, "begun": {"servers": 9}} | known))


def pulling(rank, for_s, group="servers", number=10, **known):
    begun = {"servers": 9} | {group: number}
    return moving(rank, wait=Wait(group, number, "push_pull", 64, for_s), still_s=for_s, begun=begun, **known)


ROWS = {
    "everybody moves": ([moving(0), moving(1), server(0)], None),
    "one waits for a worker that computes": ([pulling(0, 60), moving(1, still_s=2), server(0)], None),
    "one waits for a worker that sleeps": ([pulling(0, 12), moving(1, still_s=12), server(0), server(1)], ("asleep", "worker", (1,))),
    "a stopped server": ([pulling(0, 12), pulling(1, 12), silent_server(0), server(1)], ("stopped", "server", (0,))),
    "a stopped server with the number of a worker": ([pulling(0, 12), pulling(1, 12), server(0), silent_server(1)], ("stopped", "server", (1,))),
    "two stopped servers": ([pulling(0, 12), silent_server(0), silent_server(1)], ("stopped", "server", (0, 1))),
    "a silent server": ([pulling(0, 12), silent_server(0, process="D")], ("silent", "server", (0,))),
    "a stopped server that nobody waits for": ([moving(0), silent_server(0)], None),
    "a stopped server, and all wait for another": ([pulling(0, 12, "servers 1"), silent_server(0), server(1, 1)], None),
    "one of those named": ([pulling(0, 12, "servers 0,1"), silent_server(0), server(1)], ("stopped", "server", (0,))),
    "not yet": ([pulling(0, 8), silent_server(0, 8)], None),
    "a worker stopped after it had begun": (
        [pulling(0, 12), moving(1, begun={"servers": 10}, beat_age_s=12, still_s=12, process="T"), server(0)],
        ("stopped", "worker", (1,))),
    "a worker that holds the GIL alone": ([moving(0, beat_age_s=70, still_s=70, process="R"), server(0)], ("silent", "worker", (0,))),
    "a server that is gone": ([pulling(0, 6), server(0, state="dead")], ("absent", "server", (0,))),
    "a worker that left": ([pulling(0, 6), moving(1, state="left"), server(0)], ("absent", "worker", (1,))),
    "servers that beat and do nothing": ([pulling(0, 31), pulling(1, 31), server(0, 31)], ("asleep", "server", (0,))),
    "a server that is at it": ([pulling(0, 60), pulling(1, 60), server(0, 1)], None),
    "any number: a stopped server": ([pulling(0, 12, number=ANYBODY), moving(1), silent_server(0)], ("stopped", "server", (0,))),
    "any number: another computes": ([pulling(0, 60, number=ANYBODY), moving(1, still_s=2), server(0)], None),
    "any number: another sleeps": ([pulling(0, 12, number=ANYBODY), moving(1, still_s=12), server(0)], ("asleep", "worker", (1,))),
    "any number: another has left": ([pulling(0, 12, number=ANYBODY), moving(1, state="left"), server(0, 1)], None),
    "all workers wait for data": (
        [moving(0, still_s=40, doing="data"), server(0)], ("data", "worker", (0,))),
    "a dead link to a server": (
        [pulling(0, 12, links={"10.0.0.2:1 10.0.0.3:2": 9.0}), server(0, links={"10.0.0.3:2 10.0.0.2:1": 9.0})], ("link", "worker", ())),
}  # fmt: skip


@pytest.mark.case("stuck: the decision")
@pytest.mark.case("a stopped server is named")
@pytest.mark.parametrize("name", ROWS)
def test_the_table(name):
    views, expected = ROWS[name]
    found = decide(views, 0.1)
    assert (found and (found.kind, found.role, found.ranks)) == expected


def test_a_dead_link_names_both_ends_with_their_roles():
    reason = decide(ROWS["a dead link to a server"][0], 0.1).reason
    assert "worker 0 on vm (pid 100) gets no answer from server 0 on vm (pid 200)" in reason or (
        "server 0 on vm (pid 200) gets no answer from worker 0 on vm (pid 100)" in reason
    )


def test_the_lookout_keeps_server_0_and_worker_0_apart():
    clock = FakeClock(100.0)
    lookout = Lookout(Options(), clock)
    seats = {0: Change(1, 0, "joined", "", "vm", 100)}
    servers = {0: Change(1, 0, "joined", "", "vm", 200, role="server")}
    told = []

    def second(stopped: bool, number: int) -> None:
        clock.advance(1.0)
        lookout.beat(Beat(rank=0, step=5, progress=5, stack=["train.py:9 f"], waits_in="push_pull", waits_group="servers",
                          waits_number=6, waits_s=float(number), begun={"servers": 6}))  # fmt: skip
        if not stopped:
            lookout.beat(Serving(rank=0, progress=3, stack=["duty.py:9 serve"]))
        lookout.seen({"0": ["S", 1.0], "server-0": ["T" if stopped else "S", 1.0]}, {})
        told.extend(lookout.look(seats, 1, servers, 1))

    second(False, 1)
    for number in range(20):
        second(True, number)
    assert [(type(e), e.role, e.rank, e.pid, e.kind) for e in told] == [(Stuck, "server", 0, 200, "stopped")]
    assert told[0].stack == ["duty.py:9 serve"]
    second(False, 21)  # it beats again: that is enough of a server
    assert [(type(e), e.role, e.rank) for e in told[1:]] == [(Unstuck, "server", 0)]
    lookout.joined(Who("server", 0))
    assert [str(who) for who in lookout.ranks] == ["worker 0"]


# what is typed and shown


def test_the_command_that_goes_on_has_servers_and_strategy():
    job = Job("train.py", ("--lr", "0.1"), False, 4, 2)
    options = strategy_options({"form": "ps", "accumulate": 2, "tensorboard": True})
    assert job.again("it", options) == (
        "echelon run --workers 4 --servers 2 --strategy ps,accumulate=2,tensorboard=true --resume it train.py --lr 0.1"
    )
    assert Job("train.py").again("it", strategy_options({})) == "echelon run --workers 1 --resume it train.py"
    assert strategy_options({"checkpoint_dir": "s3://a,b", "seed": 1}) == [
        "--strategy",
        "seed=1",
        "--set",
        "checkpoint_dir=s3://a,b",
    ]


def test_the_first_line_counts_servers_and_their_threads():
    assert thread_plan(4, 16, None, 2)[1] == "4 workers × 4 threads + 2 servers × 2 threads on 16 cores"
    assert thread_plan(4, 2, None, 1)[1] == "4 workers × 1 thread + 1 server × 1 thread on 2 cores"
    assert thread_plan(4, 16, 3, 2)[1] == "4 workers × 3 threads + 2 servers (OMP_NUM_THREADS)"
    assert [server_threads(4, 2, cores) for cores in (1, 6, 24)] == [1, 1, 4]


def test_servers_are_awaited_before_the_first_step():
    progress = Progress(2, 1)
    assert starting_line(progress) == "starting 2 workers and 1 server…"
    for event in (Beat(rank=0), Beat(rank=1), Serving(rank=0)):
        progress.take(event, 0.0)
    assert starting_line(progress) == "2 workers and 1 server are here, no step yet"
    assert (progress.samples, sorted(progress.beats), sorted(progress.servers)) == (0, [0, 1], [0])
