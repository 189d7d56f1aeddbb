"""A server that deals and decides dies at any moment, and its copy goes on: simulated, with workers that die as well."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from echelon.ps.dealing import Dealing
from echelon.ps.deciding import Decider
from echelon.ps.pieces import Pieces, numbers, runs
from echelon.ps.service import Peer

FEED, EPOCH, MODEL = 1, 0, 7
KEY = {"feed": FEED, "epoch": EPOCH}


class Killed(Exception):
    """The server is gone in the middle of a call."""


class Notes:
    """See noting.Notes: what a copy has, over any number of servers. Now and then the server dies around keep()."""

    def __init__(self, rng: random.Random, deadly: float) -> None:
        self.rng, self.deadly = rng, deadly
        self.record: str | None = None
        self.watched: tuple[Any, Any] | None = None

    def keep(self, change, read) -> None:
        if self.rng.random() < self.deadly:
            raise Killed  # before the copy has it
        self.record = json.dumps(read()[1])
        if self.rng.random() < self.deadly:
            raise Killed  # and before anybody is told

    def left(self):
        return json.loads(self.record) if self.record is not None else None

    def watch(self, missing, lose) -> None:
        self.watched = (missing, lose)


@dataclass
class Asked:
    """A request under way (service.Request)."""

    world: World
    peer: Peer
    verb: str
    head: dict
    tensors: list = field(default_factory=list)
    reply: dict | None = None
    lost: bool = False

    def answer(self, head=None, tensors=(), sent=None) -> None:
        if self.world.rng.random() < self.world.notes.deadly:
            raise Killed  # some were told, and some were not
        assert self.reply is None
        if not self.lost:
            self.reply = json.loads(json.dumps(head or {}))


@dataclass
class Shard:
    """Updates that one server made, in order. Its copy has what its leader acknowledged, so it outlives servers."""

    made: list = field(default_factory=list)

    def fold(self, log) -> None:
        for version, parts, lead in log:
            assert version <= len(self.made), "an update is missing in between"
            if version == len(self.made):
                self.made.append((parts, lead))
            assert self.made[version] == (parts, lead), "everybody hears the same"


class Worker:
    """What Taker and FirstSync do, one small act at a time."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.version = self.number = 0
        self.open: list[int] = []
        self.take: Asked | None = None
        self.asked: Asked | None = None
        self.folding: tuple[int, list, list[Shard]] | None = None
        self.piece: int | None = None
        self.waited = self.idle = self.over = False
        self.server: Dealing | None = None
        self.committed: list[int] = []

    def act(self) -> None:
        if self.folding is not None:
            self._fold()
        elif self.asked is not None:
            self._hear()
        elif self.piece is not None:
            self._part()
        else:
            self._next()

    def _fold(self) -> None:
        """One server at a time: others may die in between."""
        version, log, shards = self.folding
        shards.pop().fold(log)
        if not shards:
            self.version, self.folding = version, None

    def _ask(self, verb: str, head: dict) -> Asked:
        if self.server is not self.world.server:
            self._rejoin()
        return self.world.call(self.rank, verb, head)

    def _rejoin(self) -> None:
        self.server = self.world.server
        ahead = self.take.reply if self.take is not None else None
        has = [*self.open, *([ahead["piece"]] if ahead and "piece" in ahead else [])]
        known = [FEED, EPOCH, self.world.total, [], has]
        question = {}
        if self.asked is not None and self.asked.verb == "part":
            question = {key: self.asked.head[key] for key in ("model", "number", "pieces")}
        head = {"epochs": [known], "question": question, "meeting": {}, "samples": 0}
        self.world.call(self.rank, "rejoin", head)

    def _again(self, asked: Asked) -> Asked:
        """Whose server is gone: its successor is asked."""
        return self._ask(asked.verb, asked.head) if asked.lost and asked.reply is None else asked

    def _hear(self) -> None:
        self.asked = asked = self._again(self.asked)
        if asked.reply is None:
            return
        self.asked, told = None, asked.reply
        if asked.verb == "part":
            piece = asked.head["pieces"][0][2]
            self.open.remove(piece)
            if told["used"]:
                self.committed.append(piece)
        if told["version"] != self.version:
            shards = self.world.shards[:]
            self.world.rng.shuffle(shards)
            self.folding = (told["version"], told["log"], shards)

    def _part(self) -> None:
        self.number += 1
        self.world.held[self.rank, self.number] = (self.piece, self.version)
        head = {
            "model": MODEL, "backup": self.world.backup, "aggregate": self.world.aggregate, "number": self.number,
            "version": self.version, "count": 1, "pieces": [[FEED, EPOCH, self.piece]], "stop": False,
        }  # fmt: skip
        self.piece = None
        self.asked = Asked(self.world, Peer("worker", self.rank, 0, 0), "part", head, lost=True)
        self._hear()

    def _next(self) -> None:
        if self.take is None:
            self.take, self.idle, self.waited = self._taking(True), True, True
            return
        if self.take.lost and self.take.reply is None:
            self.take, self.idle = self._taking(True), True
        if self.take.reply is None:
            if not self.idle:
                self.idle = self.waited = True
                self._ask("idle", KEY)
            return
        told, self.take = self.take.reply, None
        if told.get("over"):
            self.over = True
            self._catch_up(begins=False)
            return
        self.piece = told["piece"]
        self.open.append(self.piece)
        if self.world.rng.random() < 0.7:
            self.take, self.idle = self._taking(False), False
        if self.waited:
            self.waited = False
            self._catch_up(begins=True)

    def _catch_up(self, begins: bool) -> None:
        head = {"model": MODEL, "backup": self.world.backup, "aggregate": self.world.aggregate}
        self.asked = self._ask("catch_up", {**head, "version": self.version, "begins": begins})

    def _taking(self, idle: bool) -> Asked:
        return self._ask("take", {**KEY, "idle": idle, "total": self.world.total, "low": 0, "above": []})


class World:
    """Workers, two shards, and one server after the other that deals."""

    def __init__(self, seed: int, deadly: float) -> None:
        self.rng = rng = random.Random(seed)
        self.members = rng.randrange(1, 6)
        self.total = rng.randrange(1, 50)
        first = rng.random() < 0.5
        self.backup = rng.randrange(self.members) if first else 0
        self.aggregate = 0 if first and self.backup else rng.randrange(1, 9)
        self.notes = Notes(rng, deadly)
        self.shards = [Shard(), Shard()]
        self.held: dict[tuple[int, int], tuple[int, int]] = {}
        self.under_way: list[Asked] = []
        self.server = Dealing(self.members, self.notes)
        self.workers = {rank: Worker(rank, self) for rank in range(self.members)}
        self.servers = 1

    def call(self, rank: int, verb: str, head: dict) -> Asked:
        asked = Asked(self, Peer("worker", rank, 0, 0), verb, head)
        self.under_way.append(asked)
        self._alive(lambda: self.server.called(asked))
        return asked

    def _alive(self, act) -> None:
        try:
            act()
        except Killed:
            self.succeed()

    def succeed(self) -> None:
        """Another server deals, which has seen some of the dead workers go and others not."""
        for asked in self.under_way:
            asked.lost = True
        self.under_way.clear()
        self.notes.watched = None
        self.server = Dealing(self.members, self.notes)
        self.servers += 1
        for rank in set(range(self.members)) - self.workers.keys():
            if self.rng.random() < 0.5:
                self.server.gone(Peer("worker", rank, 0, 0))

    def kill_a_worker(self) -> None:
        rank = self.rng.choice(sorted(self.workers))
        came = self.workers.pop(rank).server is self.server
        for asked in self.under_way:
            asked.lost = asked.lost or asked.peer.rank == rank
        if came:
            self._alive(lambda: self.server.gone(Peer("worker", rank, 0, 0)))

    def look(self) -> None:
        """What the coordinator knows of workers that never came to this server."""
        if self.notes.watched is not None:
            missing, lose = self.notes.watched
            gone = [rank for rank in missing() if rank not in self.workers]
            self._alive(lambda: lose(gone))

    def run(self) -> None:
        for _ in range(60_000):
            working = [w for w in self.workers.values() if not w.over or w.asked is not None or w.folding]
            if not working:
                return
            if len(self.workers) > 1 and self.rng.random() < 0.003:
                self.kill_a_worker()
                continue
            self.rng.choice(working).act()
            if self.rng.random() < 0.05:
                self.look()
        raise AssertionError("the epoch does not come to its end")

    def check(self) -> None:
        first, second = (shard.made for shard in self.shards)
        assert first == second
        told = [(at, self.held[w, n]) for at, (parts, _) in enumerate(first) for w, n, _ in parts]
        assert all(computed_on == at for at, (_, computed_on) in told), "a late part counts"
        assert sorted(piece for _, (piece, _) in told) == list(range(self.total)), "each piece in one update"
        committed = [piece for worker in self.workers.values() for piece in worker.committed]
        assert len(set(committed)) == len(committed)
        if len(self.workers) == self.members:
            assert sorted(committed) == list(range(self.total)), "workers know which of theirs counted"


@pytest.mark.case("ps,backup: the deciding server dies at any moment")
@pytest.mark.parametrize("seed", range(300))
def test_every_piece_is_in_one_update_whichever_server_deals_and_whoever_dies(seed):
    world = World(seed, deadly=(0.0, 0.01, 0.05)[seed % 3])
    world.run()
    world.notes.deadly = 0.0
    world.check()


def test_a_ledger_that_was_read_again_goes_on_like_the_one_that_was_written():
    rng = random.Random(5)
    for _ in range(50):
        pieces = Pieces(2, [4, 9])
        for _ in range(rng.randrange(40)):
            worker = rng.randrange(3)
            match rng.randrange(5):
                case 0:
                    pieces.done(pieces.of(worker)[:2], worker)
                case 1:
                    pieces.lose(worker)
                case 2 if pieces.of(worker):
                    pieces.hold(pieces.of(worker)[0], worker)
                case 3 if rng.random() < 0.1:
                    pieces.end(rng.randrange(10, 30))
                case _:
                    pieces.take(worker)
        again = Pieces.read(json.loads(json.dumps(pieces.plain())))
        assert again.plain() == pieces.plain()
        assert (again.over, again.waiting, again.plenty(2)) == (pieces.over, pieces.waiting, pieces.plenty(2))
        assert [again.take(0) for _ in range(30)] == [pieces.take(0) for _ in range(30)]


def test_what_was_dealt_to_a_worker_and_never_reached_it_is_dealt_next():
    pieces = Pieces()
    pieces.end(6)
    assert [pieces.take(worker) for worker in (0, 0, 1)] == [0, 1, 2]
    pieces.adopt([0], [], 0)
    assert pieces.state() == (1, [])
    assert [pieces.take(1) for _ in range(5)] == [1, 3, 4, 5, None]


def test_numbers_are_told_in_runs():
    assert runs([5, 1, 2, 3, 9]) == [[1, 4], [5, 6], [9, 10]]
    assert numbers(runs([5, 1, 2, 3, 9])) == [1, 2, 3, 5, 9]


def test_a_part_that_is_asked_about_again_has_the_fate_that_it_had():
    pieces = Pieces()
    pieces.end(9)
    for worker in range(3):
        pieces.take(worker)
    first = Decider(range(3), 1, 0, lambda feed, epoch: pieces, lambda: pieces.waiting)
    first.part(0, 1, 0, 4, [[1, 0, 0]])
    first.part(1, 1, 0, 4, [[1, 0, 1]])
    first.part(2, 1, 0, 4, [[1, 0, 2]])
    told = json.loads(json.dumps(first.plain()))
    again = Decider.read(told, lambda feed, epoch: pieces, lambda: pieces.waiting)
    assert again.plain() == first.plain()
    (counted,), (late,) = again.part(0, 1, 0, 4, [[1, 0, 0]]), again.part(2, 1, 0, 4, [[1, 0, 2]])
    assert (counted.used, counted.version, late.used, late.version) == (True, 1, False, 1)
    assert counted.log == late.log == [[0, [[0, 1, 4], [1, 1, 4]], 0]]
    assert (again.dropped, again.policy.version, again.samples) == (1, 1, {0: 4, 1: 4})


def test_a_late_piece_that_was_dealt_to_its_worker_again_unheard_is_dealt_once_more():
    """It asks about its late part and has asked for a piece ahead; both answers are lost with the server."""
    world = World(1, deadly=0.0)
    world.members, world.backup, world.aggregate, world.total = 2, 1, 0, 4
    world.server = Dealing(2, world.notes)
    take = {**KEY, "idle": False, "total": 4, "low": 0, "above": []}
    late = world.call(0, "take", take).reply["piece"]
    other = world.call(1, "take", take).reply["piece"]
    assert world.call(0, "take", take).reply is None  # two are left for two workers: none is taken ahead
    about = {
        "model": MODEL,
        "backup": 1,
        "aggregate": 0,
        "number": 1,
        "version": 0,
        "count": 1,
        "stop": False,
    }
    used = world.call(1, "part", {**about, "pieces": [[FEED, EPOCH, other]]})
    assert used.reply["used"]
    asked = {**about, "pieces": [[FEED, EPOCH, late]]}
    world.call(0, "part", asked)
    out = json.loads(world.notes.record)["epochs"][0][2][4]
    assert out == [[late, 0]]  # a second time: nobody will tell that it has it from the first
    world.succeed()
    known = [FEED, EPOCH, 4, [], [late]]
    question = {"model": MODEL, "number": 1, "pieces": asked["pieces"]}
    rejoin = {"epochs": [known], "question": question, "meeting": {}, "samples": 0}
    world.call(0, "rejoin", rejoin)
    again = world.call(0, "part", asked).reply
    assert (again["used"], again["version"]) == (False, 1)
    dealt = [world.call(1, "take", {**take, "idle": True}).reply["piece"] for _ in range(3)]
    assert dealt == [late, 2, 3]
