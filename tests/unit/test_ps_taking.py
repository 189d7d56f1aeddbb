"""A worker's side of dealing: what it tells of the pieces that it has."""

from __future__ import annotations

from types import SimpleNamespace

from echelon.ps.taking import Taker


class Desk:
    """Answers every question with the next of `pieces`, and the last one only when it is waited for."""

    def __init__(self, pieces: list[int]) -> None:
        self.pieces, self.told, self.epochs, self.link = pieces, [], {}, self
        self.samples, self.live = 0, (0,)

    def call(self, verb, head):
        return SimpleNamespace(done=len(self.pieces) > 1, piece=self.pieces.pop(0) if self.pieces else None)

    def wait(self, asked, what):
        head = {"over": True} if asked.piece is None else {"piece": asked.piece, "low": 0}
        return SimpleNamespace(head=head)

    def tell(self, verb, head):
        self.told.append((verb, head.get("pieces")))


def test_a_piece_that_was_dropped_and_comes_back_to_this_worker_is_not_told_to_be_done():
    desk = Desk([0, 1, 1])
    taker = Taker(desk, 0, 0, 2, 0, ())
    assert [taker.take(True), taker.take(True)] == [0, 1]
    taker.done([0])
    taker.drop([1])  # too late: dealt again, to this worker, while it waits
    assert taker.take(True) == 1
    assert ("deal.done", [1]) not in desk.told
    taker.done([1])
    assert ("deal.done", [1]) in desk.told
