"""An epoch's pieces, dealt as workers ask: each is done exactly once, whatever happens in between."""

from __future__ import annotations

import random

import pytest

from echelon.ps.pieces import Pieces


def test_pieces_come_in_order_and_the_epoch_is_over_when_all_are_done():
    pieces = Pieces()
    assert [pieces.take(w) for w in (0, 1, 0)] == [0, 1, 2]
    pieces.end(3)
    assert pieces.take(1) is None
    pieces.done([0, 2], 0)
    assert not pieces.over
    pieces.done([1], 1)
    assert pieces.over


def test_what_a_lost_worker_had_is_dealt_next():
    pieces = Pieces()
    pieces.end(4)
    assert [pieces.take(w) for w in (0, 1, 1)] == [0, 1, 2]
    assert pieces.lose(1) == [1, 2]
    assert [pieces.take(0) for _ in range(4)] == [1, 2, 3, None]
    assert pieces.returned == 2
    pieces.done([1, 2], 1)  # the word of the dead comes late: they were dealt again
    assert not pieces.over
    pieces.done([0, 1, 2, 3], 0)
    assert pieces.over


def test_who_took_a_piece_behind_the_end_took_nothing():
    pieces = Pieces()
    for worker in range(3):
        pieces.take(worker)
    pieces.end(2)
    assert (pieces.of(0), pieces.of(2)) == ([0], [])
    pieces.done([0], 0)
    pieces.done([1], 1)
    assert pieces.over


def test_a_saved_ledger_goes_on_where_it_was():
    pieces = Pieces(2, [3, 5])
    pieces.end(7)
    assert [pieces.take(0) for _ in range(4)] == [2, 4, 6, None]
    pieces.done([4], 0)
    assert pieces.state() == (2, [3, 4, 5])
    pieces.done([2], 0)
    assert pieces.state() == (6, [])


def test_near_the_end_nobody_takes_one_ahead():
    pieces = Pieces()
    assert pieces.plenty(3)
    pieces.end(5)
    assert pieces.plenty(3)
    pieces.take(0), pieces.take(1)
    assert not pieces.plenty(3)


@pytest.mark.case("ps,update=async: the ledger under kills")
@pytest.mark.parametrize("seed", range(20))
def test_every_piece_is_done_once_under_random_kills_returns_and_resumes(seed):
    rng = random.Random(seed)
    total, counted = rng.randrange(1, 60), []
    pieces, held, told = Pieces(), {w: [] for w in range(4)}, False
    while not pieces.over:
        worker = rng.randrange(4)
        match rng.randrange(8):
            case 0 if held[worker]:  # killed: what it had and did not tell is dealt again
                pieces.lose(worker)
                held[worker] = []
            case 1 if held[worker]:
                pieces.back([held[worker].pop()], worker)
            case 2 if rng.random() < 0.2:  # stopped and resumed: what was out is dealt again
                pieces, held = Pieces(*pieces.state()), {w: [] for w in range(4)}
                told = False
            case 3 | 4 if held[worker]:
                number = held[worker].pop(0)
                counted.append(number)
                pieces.done([number], worker)
            case _:
                number = pieces.take(worker)
                if number is not None and number >= total:
                    pieces.end(total)
                    told = True
                elif number is not None:
                    held[worker].append(number)
        if not told and rng.random() < 0.05:
            pieces.end(total)
            told = True
    assert sorted(counted) == list(range(total))
