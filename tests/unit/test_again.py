"""A killed worker is started again: the decisions, and the pieces that carry it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from echelon.checkpoint.handed import Handed, packed
from echelon.checkpoint.holding import Holding
from echelon.clock import Deadline
from echelon.comm.alone import AloneGroup
from echelon.comm.changing import ChangingGroup
from echelon.comm.echo import EchoGroup
from echelon.comm.group import Lost, Met
from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic import again, membership
from echelon.elastic.membership import Membership
from echelon.elastic.policy import Regroup, Stop, after_loss
from echelon.errors import CheckpointError, PeerLost, PhaseFailed
from echelon.events import Beat, Entered, Facts, Failed, WorkersBack
from echelon.launch import restart
from echelon.launch.blame import Exit
from echelon.launch.ends import Ends
from echelon.launch.restart import Again, GiveUp, Known
from echelon.mesh.layout import Key, Span
from echelon.prepare.phase import Phase
from echelon.prepare.trail import Trail
from echelon.ps.held import Held
from echelon.ps.worker import Servers
from echelon.strategy import Strategy

SERVED = {"form": "ps", "apply": "server", "update": "sync"}
TRAINING = Known(num_workers=3, training=True)


def seat(state="joined", incarnation=0, term=1):
    return {"state": state, "incarnation": incarnation, "term": term, "step": 4}


@pytest.mark.case("again: the decision")
@pytest.mark.parametrize(
    ("fields", "others", "said"),
    [
        (SERVED, 2, ""),
        (SERVED | {"backend": "native"}, 1, ""),
        (SERVED, 0, "nobody is left"),
        (SERVED | {"backend": "gloo"}, 2, "cannot be made anew"),
        (SERVED | {"update": "async"}, 2, "update=async has no common step"),
        ({"form": "ps", "update": "bounded"}, 2, "update=bounded has no common step"),
        (SERVED | {"backup": 1}, 2, "no common one"),
        (SERVED | {"aggregate": 4}, 2, "no common one"),
        (SERVED | {"apply": "worker"}, 2, "the workers hold the weights"),
        ({}, 2, "the workers hold the weights"),
        (dataclasses.asdict(Strategy()), 2, "the workers hold the weights"),
    ],
)
def test_which_runs_go_on_with_a_worker_that_is_started_again(fields, others, said):
    assert said in again.why_not(fields, others)
    assert bool(said) == bool(again.why_not(fields, others))


@pytest.mark.case("again: the decision")
@pytest.mark.parametrize(
    ("code", "known", "found"),
    [
        (137, TRAINING, Again),
        (139, TRAINING, Again),
        (1, TRAINING, GiveUp),
        (0, TRAINING, GiveUp),
        (137, dataclasses.replace(TRAINING, spoke=True), GiveUp),
        (137, dataclasses.replace(TRAINING, training=False), GiveUp),
        (137, dataclasses.replace(TRAINING, stopping=True), GiveUp),
        (137, dataclasses.replace(TRAINING, in_a_row=5), Again),
        (137, dataclasses.replace(TRAINING, in_a_row=6), GiveUp),
        (137, dataclasses.replace(TRAINING, num_workers=1), GiveUp),
    ],
)
def test_a_worker_that_was_killed_is_started_again_and_one_that_failed_is_not(code, known, found):
    follows = restart.after_end(Who(WORKER, 1), code, 2, SERVED, 2, known)
    assert isinstance(follows, found)
    assert follows.reason
    if isinstance(follows, Again):
        assert follows.incarnation == 3


@pytest.mark.parametrize("fields", [SERVED, {"form": "ps", "update": "async"}, {"form": "ps"}, {}])
def test_a_worker_that_nobody_has_met_is_started_again_as_if_it_had_not_been_there(fields):
    ends, who, killed = Ends(fields), Who(WORKER, 1), Exit(1, 137, 5.0)
    ends.hear(Entered(rank=0))
    for _ in range(restart.MAX_ANEW if fields else 0):
        assert ends.follows(who, killed, 0, (3, 2), stopping=False) == Again(0, "nobody has met it yet")
    assert isinstance(ends.follows(who, killed, 0, (3, 2), stopping=False), GiveUp)
    assert isinstance(Ends(fields).follows(who, killed, 0, (3, 2), stopping=True), GiveUp)


def test_deaths_in_a_row_count_only_while_the_run_makes_no_step():
    ends, who, killed = Ends(SERVED), Who(WORKER, 1), Exit(1, 137, 5.0)
    ends.hear(Entered(rank=1))
    assert isinstance(ends.follows(who, killed, 0, (3, 2), stopping=False), GiveUp)  # before the first batch
    ends = Ends(SERVED)
    ends.hear(Facts(rank=0, lines=[]))
    for _ in range(5):
        assert isinstance(ends.follows(who, killed, 0, (3, 2), stopping=False), Again)
    ends.hear(Beat(rank=0, step=7))
    for _ in range(5):
        assert isinstance(ends.follows(who, killed, 0, (3, 2), stopping=False), Again)
    assert isinstance(ends.follows(who, killed, 0, (3, 2), stopping=False), GiveUp)


def test_whoever_was_replaced_is_the_first_failure_until_its_successor_is_at_work():
    ends, who = Ends(SERVED), Who(WORKER, 1)
    ends.hear(Facts(rank=0, lines=[]))
    ends.put(who, Exit(1, 137, 5.0))
    assert isinstance(ends.follows(who, Exit(1, 137, 5.0), 0, (2, 2), stopping=False), Again)
    assert ends.verdict() is None
    late = Failed(rank=1, host="h", step=3, code=1, error="PeerLost: nobody", traceback="", consequence=True)
    ends.hear(late)
    ends.put(who, Exit(1, 1, 9.0))
    verdict = ends.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.code) == (1, 137)
    ends.hear(WorkersBack(rank=0, ranks=[1], step=8, pause_s=1.0))
    verdict = ends.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.code) == (1, 1)


@pytest.mark.case("again: the decision")
@pytest.mark.parametrize(
    ("seats", "known", "tried", "found"),
    [
        ({0: seat(), 1: seat()}, (0, 0), 0, again.Wait),
        ({0: seat(), 1: seat("dead", 0, 2)}, (0, 0), 0, again.Wait),
        ({0: seat(), 1: seat("joined", 1, 3)}, (0, 0), 0, again.Meet(3, (0, 1))),
        ({0: seat(), 1: seat("joined", 1, 3)}, (0, 0), 3, again.Wait),
        ({0: seat(), 1: seat("joined", 1, 3)}, (), 0, again.Meet(3, (0, 1))),
        ({0: seat("joined", 1, 5), 1: seat("joined", 1, 3)}, (0, 1), 3, again.Meet(5, (1, 1))),
        ({0: seat()}, (), 0, again.Wait),
        ({0: seat("left", 0, 4), 1: seat("joined", 1, 3)}, (), 0, again.Never),
        ({0: seat("failed", 0, 4), 1: seat("joined", 1, 3)}, (0, 0), 0, again.Never),
    ],
)
def test_all_who_read_one_roster_meet_in_one_term(seats, known, tried, found):
    told = again.standing(seats, 2, known, tried)
    assert told == found if isinstance(found, again.Meet) else isinstance(told, found)
    if not isinstance(told, again.Meet):
        assert told.reason


@pytest.mark.case("again: the decision")
def test_a_lost_step_regroups_only_if_nobody_left_or_failed():
    lost = ((1,), "closed")
    assert after_loss(*lost, {1: seat("dead")}, 0, 3, "") == Regroup()
    assert after_loss(*lost, {1: seat("joined", 1, 3)}, 0, 3, "") == Regroup()
    assert isinstance(after_loss(*lost, {1: seat("failed")}, 0, 3, ""), Stop)
    assert isinstance(after_loss(*lost, {1: seat("left")}, 0, 3, ""), Stop)
    assert isinstance(after_loss(*lost, {1: seat("dead")}, 0, 3, "some reason"), Stop)
    told = after_loss(*lost, {1: seat("dead")}, 0, 3, "its values are gone", "a call")
    assert isinstance(told, Stop)
    assert "a call after step 3" in str(told.error)
    assert "its values are gone" in str(told.error)


def test_nobody_of_an_older_term_waits_for_a_successor():
    now = Membership(2, num_servers=1)
    for change in (
        membership.join(now, 0, "h", 1, 0),
        membership.join(now, 1, "h", 2, 0),
        membership.join(now, 0, "h", 3, 0, SERVER),
    ):
        assert change is not None
        now = membership.apply(now, change)
    back = membership.join(now, 1, "h", 9, 1)  # before anybody said that its predecessor died
    assert back is not None
    now = membership.apply(now, back)
    assert now.lost_since(1) == (1,)
    assert now.lost_since(now.term) == ()
    assert now.lost_since(0) == ()


@pytest.mark.case("again: the state is handed over")
def test_what_is_handed_over_comes_out_as_it_went_in():
    tensors = {
        Key("a"): torch.randn(3, 4, dtype=torch.float64).t(),
        Key("a", "ema"): torch.randn(4, 3).to(torch.bfloat16),
        Key("n"): torch.tensor(7),
        Key("mask"): torch.tensor([True, False, True]),
        Key("c"): torch.randn(2, dtype=torch.complex64),
        Key("none"): torch.zeros(0, 5),
    }
    holdings = [Holding(k, x, Span.whole(tuple(x.shape)), (0,)) for k, x in tensors.items()]
    tree = {
        "step": 5,
        "random": {"x": torch.arange(5)},
        "trail": [{"kind": "loop 0", "value": (1, 2.5, None)}],
    }
    handed = Handed(packed(5, 3, holdings, tree))
    assert (handed.step, handed.world_size) == (5, 3)
    assert set(handed.keys()) == set(tensors)
    for key, x in tensors.items():
        out = torch.empty_like(x)
        handed.read(key, out)
        assert torch.equal(out, x)
        assert (handed.shape(key), handed.dtype(key)) == (tuple(x.shape), x.dtype)
    again_tree = handed.objects(2)
    assert torch.equal(again_tree["random"].pop("x"), tree["random"].pop("x"))
    assert again_tree == tree
    with pytest.raises(CheckpointError, match="here"):
        handed.read(Key("a"), torch.zeros(3, 4))
    with pytest.raises(CheckpointError, match="makes no sense"):
        Handed(torch.arange(40, dtype=torch.uint8))


SOON = Deadline.after(60.0)


@pytest.mark.case("again: groups that change")
def test_a_group_that_pretends_takes_the_others_to_have_what_it_has():
    group = EchoGroup(1, 3, torch.device("cpu"))
    x = torch.tensor([2.0, 3.0])
    assert group.all_reduce(x).wait(SOON) == Met()
    assert x.tolist() == [6.0, 9.0]
    out = torch.zeros(3, 2)
    group.all_gather(out, x)
    assert out.tolist() == [[6.0, 9.0]] * 3
    group.all_reduce(x, "max")
    group.broadcast(x)
    assert x.tolist() == [6.0, 9.0]
    part = torch.zeros(2)
    group.reduce_scatter(part, out)
    assert part.tolist() == [18.0, 27.0]
    got = group.recv(torch.zeros(1), 2)
    assert (got.wait(SOON), got.source) == (Met(), 2)


@pytest.mark.case("again: groups that change")
def test_a_group_is_given_another_one_and_what_cannot_be_made_is_a_loss():
    made: list[AloneGroup] = []

    def make(name: str):
        if len(made) == 2:
            raise PeerLost("worker 4 is gone", peers=(4,))
        made.append(AloneGroup())
        return made[-1]

    group = ChangingGroup("gradients", 0, 1, torch.device("cpu"), make)
    assert group.barrier().wait(SOON) == Met()
    made[0].abort("somebody died")
    assert isinstance(group.barrier().wait(SOON), Lost)
    group.pretends = True
    assert group.barrier().wait(SOON) == Met()
    group.pretends = False
    group.change()
    assert len(made) == 1  # only when it is asked for
    assert group.barrier().wait(SOON) == Met()
    group.change()
    assert group.barrier().wait(SOON) == Lost((4,), "worker 4 is gone")
    assert group.all_gather(torch.zeros(1, 2), torch.ones(2)).wait(SOON) == Lost((4,), "worker 4 is gone")


def test_a_moment_in_front_of_which_a_run_was_left_comes_when_it_is_resumed():
    arrived: list[bool] = []
    for done in (False, True):
        trail = Trail(lambda: arrived.append(True))
        trail.follow(
            [
                {
                    "kind": "save",
                    "done": done,
                    "here": True,
                    "value": None,
                    "body": [],
                    "inside": False,
                    "optional": True,
                }
            ]
        )
        assert (trail.moment("save") is not None) == (not done)
    assert arrived == [True, True]


@pytest.mark.case("again: groups that change")
def test_while_nothing_counts_servers_are_not_asked():
    class Refusing:
        server, local = "nowhere", True

        def buffer(self, num_bytes: int) -> torch.Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8)

        def call(self, *args, **kwargs):
            raise AssertionError("asked")

        def close(self) -> None:
            pass

    servers = Servers([Refusing(), Refusing()], ["h", "h"])  # type: ignore[list-item]
    servers.pretend(True)
    params = [("a", torch.ones(5)), ("b", torch.ones(7))]
    held = Held(servers, 1, params, 0)
    held.open()
    flat = torch.ones(12)
    pushes = held.push(flat, held.runs(["a", "b"], [0, 5]))
    held.take_back(pushes)
    assert held.squares(["a", "b"]) == ([[0.0], [0.0]], True)
    assert held.state(0, ["a"]) == {}
    assert torch.equal(params[0][1], torch.ones(5))
    servers.pretend(False)
    with pytest.raises(AssertionError, match="asked"):
        held.open()


@pytest.mark.parametrize(
    ("rank", "code", "others", "fields", "goes_on"),
    [
        (2, 137, 2, {"update": "async"}, True),
        (0, 137, 2, {"update": "async"}, True),
        (0, 137, 1, {"backup": 1}, True),
        (0, 137, 0, {"update": "async"}, False),
        (0, 1, 2, {"update": "async"}, False),
        (0, 137, 2, {"update": "sync"}, False),
        (1, 137, 2, {"update": "bounded"}, False),
    ],
)
def test_whom_the_others_go_on_without(rank, code, others, fields, goes_on):
    found = restart.without(Who(WORKER, rank), code, {"form": "ps", **fields}, others)
    assert isinstance(found, restart.GoOn) == goes_on


class Told:
    """A coordinator's table, of which a worker hears after some looks."""

    def __init__(self, words: list[bytes | None]) -> None:
        self.words, self.said = words, b""

    def call(self, method: str, deadline: Deadline, **args: Any) -> Any:
        if method == "store.check":
            return self.words[0] is not None if len(self.words) == 1 else self.words.pop(0) is not None
        if method == "store.get":
            return self.words[0]
        self.said = args["value"]
        return None


def test_a_phase_that_a_killed_worker_left_unfinished_is_done_by_the_next():
    done, turns = [], [False, True]
    told = Told([None])
    with Phase("notes", 1, 1, told, [].append, does=False, heir=lambda: turns.pop(0)):  # type: ignore[arg-type]
        done.append(1)
    assert (done, told.said) == ([1], b"ok")
    told = Told([None, b"ok"])
    with Phase("notes", 2, 2, told, [].append, does=False, heir=lambda: False):  # type: ignore[arg-type]
        done.append(2)
    assert (done, told.said) == ([1], b"")
    failed = Phase(
        "notes", 3, 2, Told([b"failed on rank 1: no disk"]), [].append, does=False, heir=lambda: True
    )  # type: ignore[arg-type]
    with pytest.raises(PhaseFailed, match="'notes' failed on rank 1: no disk"):
        failed.__enter__()
