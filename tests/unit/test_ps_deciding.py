"""Which parts make an update, where the first ones do: decided once, told to everybody, and every piece in one update."""

from __future__ import annotations

import random

import pytest

from echelon.ps.deciding import Decider
from echelon.ps.pieces import Pieces


def decider(members: int, pieces: Pieces, backup: int = 0, aggregate: int = 0) -> Decider:
    return Decider(range(members), backup, aggregate, lambda feed, epoch: pieces, lambda: pieces.waiting)


def test_the_first_parts_make_the_update_and_the_late_one_is_dropped():
    pieces = Pieces()
    pieces.end(9)
    taken = [pieces.take(w) for w in range(3)]
    decides = decider(3, pieces, backup=1)
    assert decides.part(0, 1, 0, 4, [[1, 0, taken[0]]]) == []  # it waits for another
    first, second = decides.part(1, 1, 0, 5, [[1, 0, taken[1]]])
    assert {first.worker, second.worker} == {0, 1}
    assert first.version == second.version == 1
    assert first.log == [[0, [[0, 1, 4], [1, 1, 5]], 0]]
    assert first.used
    assert second.used
    (late,) = decides.part(2, 1, 0, 4, [[1, 0, taken[2]]])
    assert (late.used, late.version, decides.dropped) == (False, 1, 1)
    assert late.log == first.log  # so that its servers get there too
    assert pieces.take(0) == taken[2]  # dealt again, next


def test_what_a_worker_delivered_counts_though_it_dies():
    pieces = Pieces()
    pieces.end(4)
    for worker in range(3):
        pieces.take(worker)
    decides = decider(3, pieces, backup=1)
    decides.part(2, 1, 0, 1, [[1, 0, 2]])
    assert pieces.lose(2) == []
    answers = decides.lost(2)  # two are left, and one part is enough
    assert answers == []
    assert decides.policy.version == 1
    assert pieces.of(2) == []
    assert pieces.state() == (0, [2])


def test_with_nothing_left_to_deal_fewer_parts_make_the_last_update():
    pieces = Pieces()
    pieces.end(2)
    pieces.take(0), pieces.take(1)
    decides = decider(4, pieces, backup=0)
    decides.took(0), decides.took(1)
    assert decides.part(0, 1, 0, 1, [[1, 0, 0]]) == []
    answers = decides.part(1, 1, 0, 1, [[1, 0, 1]])
    assert {a.worker for a in answers} == {0, 1}
    assert pieces.over


@pytest.mark.case("ps,backup: every piece in one update, under delays and kills")
@pytest.mark.parametrize("seed", range(30))
def test_every_piece_is_in_one_update_and_exactly_the_late_parts_are_dropped(seed):
    rng = random.Random(seed)
    members, total = rng.randrange(2, 6), rng.randrange(1, 50)
    backup, aggregate = (rng.randrange(members), 0) if rng.random() < 0.6 else (0, rng.randrange(1, 9))
    pieces = Pieces()
    pieces.end(total)
    decides = decider(members, pieces, backup, aggregate)
    log: dict[int, list] = {}
    version, number = dict.fromkeys(range(members), 0), dict.fromkeys(range(members), 0)
    computing: dict[int, int] = {}
    given: dict[tuple[int, int], tuple[int, int]] = {}
    waiting: set[int] = set()
    alive = set(range(members))
    dropped = 0

    def hear(answers) -> None:
        nonlocal dropped
        for answer in answers:
            waiting.discard(answer.worker)
            for at, parts, _ in answer.log:
                assert log.setdefault(at, parts) == parts  # everybody hears the same
            version[answer.worker] = answer.version
            dropped += answer.used is False

    for _ in range(20_000):
        if pieces.over:
            break
        worker = rng.choice(sorted(alive))
        if len(alive) > 1 and rng.random() < 0.01:
            alive.discard(worker)
            computing.pop(worker, None), waiting.discard(worker)
            pieces.lose(worker)
            hear(decides.lost(worker))
        elif worker in computing:
            number[worker] += 1
            piece = computing.pop(worker)
            given[worker, number[worker]] = (piece, version[worker])
            waiting.add(worker)
            hear(decides.part(worker, number[worker], version[worker], 1, [[1, 0, piece]]))
        elif worker not in waiting:
            piece = pieces.take(worker)
            if piece is None:
                hear(decides.idle(worker))
                hear(decides.look())
            else:
                hear([decides.catch_up(worker, version[worker], begins=True)])
                computing[worker] = piece
    assert pieces.over
    told = [(at, given[w, n]) for at, parts in log.items() for w, n, _ in parts]
    assert all(computed_on == at for at, (_, computed_on) in told)  # no late part counts
    assert len({piece for _, (piece, _) in told}) == len(told)
    assert dropped <= decides.dropped
