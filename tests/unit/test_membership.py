"""Membership as a table of what happened and what follows; journal, table and history beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from echelon.elastic import membership
from echelon.elastic.history import History, read_event
from echelon.elastic.journal import Journal
from echelon.elastic.membership import Change, Membership
from echelon.elastic.table import MAX_KEY_CHARS, MAX_KEYS, Table
from echelon.errors import PeerLost, UsageError
from echelon.events import Beat, Warned


def formed(num_workers: int = 3) -> Membership:
    now = Membership(num_workers)
    for rank in range(num_workers):
        change = membership.join(now, rank, f"host{rank}", 100 + rank, 0)
        assert change is not None
        now = membership.apply(now, change)
    return now


def after(now: Membership, change: Change | None) -> Membership:
    assert change is not None
    return membership.apply(now, change)


def test_those_who_form_the_run_agree_on_term_1():
    now = formed()
    assert now.term == 1
    assert {seat.state for seat in now.seats.values()} == {"joined"}
    assert now.seats[2].reason == "rank 2 joined on host2 (3 of 3)"


def test_a_rank_that_connects_again_changes_nothing():
    assert membership.join(formed(), 1, "host1", 101, 0) is None


def test_every_later_change_raises_the_term_and_says_why():
    now = after(formed(), membership.died(formed(), 1, 137, step=4))
    assert (now.term, now.seats[1].state) == (2, "dead")
    assert now.seats[1].reason == "rank 1 on host1 (pid 101) ended without a word (signal 9) after step 4"
    now = after(now, membership.leave(now, 0, 9, 0))
    assert (now.term, now.seats[0].state, now.seats[0].step) == (3, "left", 9)
    now = after(now, membership.leave(now, 2, 9, 3))
    assert (now.term, now.seats[2].state) == (4, "failed")
    assert now.awaited == frozenset()
    now = after(now, membership.join(now, 1, "host9", 200, 1))
    assert (now.term, now.seats[1].state, now.awaited) == (5, "joined", {1})


def test_a_rank_that_said_goodbye_does_not_die_as_well():
    now = after(formed(), membership.leave(formed(), 1, 5, 0))
    assert membership.died(now, 1, 0) is None
    assert membership.leave(now, 1, 5, 0) is None


def test_a_rank_may_die_before_it_joins():
    now = after(Membership(2), membership.died(Membership(2), 1, 1))
    assert now.seats[1].reason == "rank 1 ended (exit code 1) before it joined"
    assert now.awaited == {0}


def test_only_losses_after_a_term_concern_it():
    now = after(formed(), membership.died(formed(), 1, 137))
    assert now.lost_since(1) == (1,)
    assert now.lost_since(2) == ()
    now = after(now, membership.leave(now, 0, 3, 0))
    assert now.lost_since(1) == (1,)  # a proper end is no loss
    assert after(now, membership.join(now, 1, "h", 7, 1)).lost_since(0) == ()


@pytest.mark.parametrize("rank", [-1, 3, 1 << 40])
def test_a_rank_outside_the_run_is_refused(rank):
    with pytest.raises(UsageError):
        membership.join(formed(), rank, "h", 1, 0)
    with pytest.raises(UsageError):
        membership.died(formed(), rank, 1)


def test_an_incarnation_that_was_replaced_does_not_come_back():
    now = after(formed(), membership.died(formed(), 1, 137))
    now = after(now, membership.join(now, 1, "h", 7, 1))
    with pytest.raises(UsageError, match="was replaced"):
        membership.join(now, 1, "host1", 101, 0)


def test_an_older_term_is_refused():
    now = after(formed(), membership.died(formed(), 1, 137))
    with pytest.raises(UsageError, match="term 1 came in term 2"):
        membership.apply(now, Change(1, 0, "dead", "late"))


def test_the_journal_gives_back_what_was_written_and_drops_a_torn_line(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    change = membership.join(Membership(1), 0, "h", 1, 0)
    assert change is not None
    journal.add(change.to_dict(), sync=True)
    journal.add({"kind": "set", "key": "k", "value": ""}, sync=False)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"set","key":"to')
    again = Journal(path)
    assert membership.read_change(again.records[0]) == change
    assert [r["kind"] for r in again.records] == ["member", "set"]
    again.add({"kind": "stop"}, sync=False)
    again.rewrite([{"kind": "a"}, {"kind": "b"}])
    again.add({"kind": "c"}, sync=True)
    again.close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_the_table_is_bounded_and_restores_itself_from_its_records():
    records: list[dict[str, object]] = []
    table = Table(records.append)
    table.set("a", b"\x00\xff")
    assert table.add("n", 41) + table.add("n", 1) == 83
    table.set("gone", b"x")
    assert table.delete("gone")
    assert table.compare_set("a", b"other", b"new") == b"\x00\xff"
    assert table.compare_set("absent", b"something", b"new") == b"something"
    with pytest.raises(UsageError, match="not hold a number"):
        table.add("a", 1)
    with pytest.raises(UsageError, match="64 bits"):
        table.add("n", (1 << 63) - 1)
    with pytest.raises(UsageError, match="characters"):
        table.set("k" * (MAX_KEY_CHARS + 1), b"")
    fresh = Table(lambda record: None)
    for record in records:
        fresh.restore(record)
    assert list(fresh.records()) == list(table.records())
    assert fresh._num_bytes == table._num_bytes
    for i in range(MAX_KEYS - fresh.count()):
        fresh.set(f"k{i}", b"")
    with pytest.raises(UsageError, match="full"):
        fresh.set("one more", b"")
    fresh.set("k0", b"what is there may change")


def test_a_wait_ends_with_the_loss_that_makes_it_pointless():
    async def story() -> None:
        table = Table(lambda record: None)
        lost: list[PeerLost] = []
        waiting = asyncio.ensure_future(table.get("k", 10.0, lambda: lost[0] if lost else None))
        await asyncio.sleep(0)
        table.check_waits()
        assert not waiting.done()
        lost.append(PeerLost("rank 1 died", peers=(1,)))
        table.check_waits()
        with pytest.raises(PeerLost):
            await waiting
        assert not table._waits

    asyncio.run(story())


def test_history_thins_beats_in_the_file_and_numbers_go_on(tmp_path: Path):
    async def story() -> None:
        now = [0.0]
        history = History(tmp_path / "events.jsonl", clock=lambda: now[0])
        for second in range(12):
            now[0] = float(second)
            history.add(Beat(rank=0, step=second))
        told = await history.watch(0, 0.0)
        assert [e["step"] for e in told["events"]] == list(range(12))
        assert (await history.watch(told["next"], 0.01))["events"] == []
        history.add(Warned(message="more"))
        later = await history.watch(told["next"], 0.0)
        assert [e["message"] for e in later["events"]] == ["more"]
        assert (await history.watch(later["next"] + 1000, 0.0))["next"] == later["next"]
        history.close()

    asyncio.run(story())
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [0, 5, 10, None, 11]  # the last one tells of the whole run


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": "Nothing"},
        {"event": "Event"},
        {"event": "Warned"},
        {"event": "Warned", "message": 3},
        {"event": "Warned", "message": "x", "more": 1},
        {"event": "Beat", "step": True},
        {"event": "Logged", "step": 1, "values": {"a": "b"}, "weight": 1.0},
    ],
)
def test_an_event_of_the_wrong_form_is_void(record):
    assert read_event(record) is None


def test_a_long_text_is_cut():
    event = read_event({"event": "Warned", "message": "x" * 1_000_000})
    assert isinstance(event, Warned)
    assert len(event.message) < 70_000
