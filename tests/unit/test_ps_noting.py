"""What a server decided is with its copy before anybody is told; many changes travel together; who never comes may be gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from echelon.control.roster import DEAD, JOINED
from echelon.errors import WorldError
from echelon.ps.copies import Copies
from echelon.ps.noting import Noted

WORKERS, CALLS = 8, 50


class Mirror:
    """A partner that takes a moment."""

    def __init__(self) -> None:
        self.got: list[dict] = []

    def note(self, record: dict) -> None:
        threading.Event().wait(0.001)
        self.got.append(record)


def noted(mirror: Mirror | None, roster=dict) -> Noted:
    training = SimpleNamespace(
        mirrors={0: mirror} if mirror is not None else {}, copies=Copies(0, WORKERS, 2)
    )
    return Noted(training, SimpleNamespace(roster=roster))


def test_nobody_goes_on_before_the_copy_has_its_change_and_changes_share_messages():
    mirror, lock, done = Mirror(), threading.Lock(), []
    notes, changes = noted(mirror), []

    def read() -> tuple[int, dict]:
        with lock:
            return len(changes), {"changes": len(changes)}

    def work() -> None:
        for _ in range(CALLS):
            with lock:
                changes.append(None)
                mine = len(changes)
            notes.keep(mine, read)
            done.append(mirror.got[-1]["changes"] >= mine)

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * (WORKERS * CALLS)
    assert len(mirror.got) < WORKERS * CALLS
    assert [r["changes"] for r in mirror.got] == sorted({r["changes"] for r in mirror.got})


def test_what_changes_nothing_is_not_sent_and_without_a_copy_nothing_is():
    mirror = Mirror()
    notes = noted(mirror)
    for change in range(1, 5):
        notes.keep(change, lambda at=change: (at, {"decided": at // 3}))
    assert mirror.got == [{"decided": 0}, {"decided": 1}]
    noted(None).keep(1, lambda: (1, {}))


def test_the_newest_record_is_what_a_successor_finds():
    notes = noted(None)
    assert notes.left() is None
    for at in [(0, 1), (0, 3), (0, 2), (1, 1)]:
        notes.training.copies.note(0, at, {"at": list(at)})
    assert notes.left() == {"at": [1, 1]}
    notes.training.copies.note(0, (0, 9), {"at": "of a leader that is gone"})
    assert notes.left() == {"at": [1, 1]}


def test_a_worker_that_never_comes_is_lost_when_the_coordinator_says_so():
    missing, lost, asked = {1, 2}, [], []

    def roster() -> dict:
        asked.append(None)
        if len(asked) == 1:
            raise WorldError("it is being started again")
        return {0: {"state": JOINED}, 1: {"state": DEAD}, 2: {"state": JOINED}}

    def lose(ranks) -> None:
        gone = list(ranks)
        lost.extend(gone)
        missing.difference_update([*gone, 2])  # and the other one comes

    notes = noted(None, roster)
    notes.watch(lambda: set(missing), lose)
    notes._thread.join(30)
    assert lost == [1]
    notes.close()
