"""Copies of what servers hold, behind real Hosts in this process: filled, followed, taken over, filled again; in shared memory and TCP."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from echelon.clock import Deadline
from echelon.control.handshake import Identity
from echelon.control.roster import partner
from echelon.elastic import leads
from echelon.errors import EchelonError, LinkLost, PeerLost
from echelon.ps import copies, judge, session
from echelon.ps.held import Held
from echelon.ps.host import Host
from echelon.ps.link import Link
from echelon.ps.recipes import Recipe
from echelon.ps.route import Route
from echelon.ps.worker import Servers
from tests.unit.test_ps_session import RUN, TOKEN, soon
from tests.unit.test_ps_terms import N, grads, plain
from tests.unit.test_ps_terms import copies as params_of

RECIPES = {
    "adam": Recipe.from_plain({"name": "adam", "numbers": {"lr": 0.1}}),
    "sgd": Recipe.from_plain({"name": "sgd", "numbers": {"lr": 0.1, "momentum": 0.9}}),
}


class Site:
    """Servers that can be ended and started again, their coordinator (leads.py), and workers that go by routes."""

    def __init__(self, workers: int, servers: int, shared: bool) -> None:
        self.workers, self.servers, self.shared = workers, servers, shared
        self.lock = threading.Condition()
        self.leads = leads.first(servers)
        self.hosts: list[Host | None] = [None] * servers
        self.training: list[session.Training] = [None] * servers  # type: ignore[list-item]
        for rank in range(servers):
            self.start(rank, leading=True)
        self.routes = [[self.route(s, w) for s in range(servers)] for w in range(workers)]

    def start(self, rank: int, leading: bool = False) -> None:
        held = copies.Copies(rank, self.workers, self.servers, leads=leading)
        self.training[rank] = session.Training(self.workers, held, Reach(self, rank))
        services = {
            session.NAME: self.training[rank],
            copies.NAME: copies.Copying(held),
            judge.NAME: judge.Judge(self.servers),
        }
        self.hosts[rank] = Host(services, TOKEN, RUN)
        self.hosts[rank].start()

    def end(self, rank: int) -> None:
        """As its process would: connections break, and then the coordinator hears of it."""
        host, self.hosts[rank] = self.hosts[rank], None
        self.training[rank].close()
        host.close(soon())
        with self.lock:
            self.leads, _ = leads.fell(self.leads, rank, f"server {rank} ended")
            self.lock.notify_all()

    def link(self, rank: int, role: str, caller: int) -> Link:
        host = self.hosts[rank]
        if host is None:
            raise LinkLost(f"server {rank} is not there")
        return Link.connect(host.address, TOKEN, Identity(RUN, role, caller, 0), soon(), shared=self.shared)

    def route(self, shard: int, worker: int) -> Route:
        def find(shard: int, epoch: int) -> tuple[Link, int]:
            with self.lock:
                assert self.lock.wait_for(lambda: self.leads[shard].epoch > epoch, 30)
                lead = self.leads[shard]
            if lead.lost:
                raise LinkLost(lead.lost)
            link = self.link(lead.rank, "worker", worker)
            link.call("train.lead", {"shard": shard, "epoch": lead.epoch}).wait(soon())
            return link, lead.epoch

        return Route(shard, self.link(shard, "worker", worker), 0, find)

    def held(self, model: int = 1) -> list[Held]:
        ways = [Servers(routes, ["h"] * self.servers, replicas=1) for routes in self.routes]
        made = [Held(ways[w], model, params_of(self.workers)[w], w) for w in range(self.workers)]
        assert self.all(lambda w: made[w].open()) == [None] * self.workers
        return made

    def all(self, act) -> list:
        found: list = [None] * self.workers

        def one(rank: int) -> None:
            try:
                found[rank] = act(rank)
            except EchelonError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker waits for an answer that does not come"
        return found

    def until_copied(self) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: all(lead.copied for lead in self.leads), 30), self.leads

    def close(self) -> None:
        for route in (r for routes in self.routes for r in routes):
            route.close()
        for training in self.training:
            training.close()
        for host in self.hosts:
            if host is not None:
                host.close(soon())


class Reach:
    """mirror.Site of one server."""

    def __init__(self, site: Site, rank: int) -> None:
        self.site, self.rank = site, rank

    def connect(self, rank: int) -> Link | None:
        try:
            return self.site.link(rank, "server", self.rank)
        except EchelonError:
            return None

    def judge(self) -> Link:
        with self.site.lock:
            lead = self.site.leads[0].rank
        return self.site.link(lead, "server", self.rank)

    def copied(self, shard: int, epoch: int, copied: bool) -> bool:
        with self.site.lock:
            found = leads.told(self.site.leads, shard, self.rank, epoch, copied)
            self.site.leads = found or self.site.leads
            self.site.lock.notify_all()
            return found is not None


@pytest.fixture(params=[True, False], ids=["shared memory", "tcp"])
def make(request):
    made = []

    def site(workers: int = 2, servers: int = 2) -> Site:
        made.append(Site(workers, servers, request.param))
        return made[-1]

    yield site
    for one in made:
        one.close()


def stepped(held: Held, step: int, rank: int, recipe: str = "adam") -> None:
    held.follow()
    held.push(grads(step, rank), held.runs(["a", "b"], [0, N]))
    held.squares(["a"])
    held.apply(0, [(RECIPES[recipe], 1.0, ["a", "b"])], [])


def check(held: list[Held], steps: int) -> None:
    right = plain(steps, len(held))
    for mine in held:
        for x, y in zip(mine.params.values(), right, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.case("ps: a copy takes over, and never less than was acknowledged")
@pytest.mark.parametrize("servers", [2, 3])
def test_servers_end_one_after_the_other_and_every_step_counts_once(make, servers):
    site = make(2, servers)
    held = site.held()
    step = 0
    for gone in [0, 1, 0, servers - 1]:
        for _ in range(2):
            assert site.all(lambda w, s=step: stepped(held[w], s, w)) == [None, None]
            step += 1
        site.until_copied()
        site.end(gone)
        assert site.all(lambda w, s=step: stepped(held[w], s, w)) == [None, None]
        step += 1
        site.start(gone)
    check(held, step)
    site.until_copied()


def test_a_copy_is_the_same_to_the_bit_and_follows_all_that_changes(make):
    site = make(2, 2)
    held = site.held()
    site.all(lambda w: stepped(held[w], 0, w))
    held[0].params["a"].zero_()
    held[0].upload()
    site.all(lambda w: stepped(held[w], 1, w))
    state = held[0].state(0, ["a", "b"])
    site.all(lambda w: held[w].load(0, [(RECIPES["adam"], ["a", "b"])], state))
    site.all(lambda w: stepped(held[w], 2, w))
    for shard in range(2):
        mine = site.training[shard].copies.held[shard, 1]
        other = site.training[partner(shard, shard, 2)].copies.held[shard, 1]
        give_up = soon()
        while other.shard.updates != mine.shard.updates:  # what is acknowledged is made a moment later
            assert not give_up.passed
        with mine.lock, other.lock:
            assert torch.equal(mine.shard.memory, other.shard.memory)
            told, tensors = mine.shard.snapshot()
            theirs, others = other.shard.snapshot()
            assert told == theirs
            assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
            assert (mine.done, mine.shard.updates) == (other.done, other.shard.updates)


@pytest.mark.parametrize(
    "when", ["pushed by one", "pushed by all", "one has applied", "squares were told to one"]
)
def test_a_server_that_ends_in_the_middle_of_a_step_costs_nothing(make, when):
    site = make(2, 2)
    held = site.held()
    site.all(lambda w: stepped(held[w], 0, w))
    site.until_copied()
    runs = [h.runs(["a", "b"], [0, N]) for h in held]
    data = [grads(1, w) for w in range(2)]
    held[0].push(data[0], runs[0])
    if when != "pushed by one":
        held[1].push(data[1], runs[1])
    if when == "squares were told to one":
        site.all(lambda w: held[w].squares(["a", "b"]))
    rest = threading.Event()

    def one(w: int) -> None:
        if w == 1:
            rest.wait(30)
            if when == "pushed by one":
                held[1].push(data[1], runs[1])
        held[w].apply(0, [(RECIPES["adam"], 1.0, ["a", "b"])], [])

    def end(w: int) -> None:
        site.end(0)
        rest.set()

    threads = [threading.Thread(target=end, args=(0,))]
    if when == "one has applied":
        threads[0].start()
        found = site.all(one)
    else:
        end(0)
        found = site.all(one)
        threads[0] = None
    if threads[0] is not None:
        threads[0].join(30)
    assert found == [None, None]
    check(held, 2)


def test_a_model_is_opened_while_the_partner_has_just_ended(make):
    """Its copy is filled with the others when the partner is there again, and takes over."""
    site = make()
    first = site.held()
    site.end(0)
    second = site.held(model=2)
    site.start(0)
    site.until_copied()
    for made in (first, second):
        assert site.all(lambda w, made=made: stepped(made[w], 0, w)) == [None, None]
    site.end(1)
    for made in (first, second):
        assert site.all(lambda w, made=made: stepped(made[w], 1, w)) == [None, None]
        check(made, 2)


def test_a_model_is_opened_while_another_worker_tells_the_new_leader(make, monkeypatch):
    """The new leader knows that its partner is gone before anybody opens a model there: none waits for the partner."""
    site = make()
    site.held()
    site.until_copied()
    told, made = threading.Event(), []
    mirror = site.training[1]._mirror

    def slow(shard, there):
        made.append(there)
        told.set()
        time.sleep(0.5)
        return mirror(shard, there)

    monkeypatch.setattr(site.training[1], "_mirror", slow)
    site.end(0)
    link = site.link(1, "worker", 1)
    first = link.call("train.lead", {"shard": 0, "epoch": 1})
    assert told.wait(30)
    second = site.held(model=2)
    first.wait(soon())
    assert made == [False]
    site.start(0)
    site.until_copied()
    assert site.all(lambda w: stepped(second[w], 0, w)) == [None, None]
    check(second, 1)
    link.close()


def test_without_a_whole_copy_nobody_takes_over_and_workers_are_told(make):
    site = make(2, 2)
    held = site.held()
    site.all(lambda w: stepped(held[w], 0, w))
    site.until_copied()
    site.end(0)
    site.all(lambda w: stepped(held[w], 1, w))
    site.end(1)
    for error in site.all(lambda w: stepped(held[w], 2, w)):
        assert isinstance(error, LinkLost)
        assert "no other server had a whole copy" in str(error)


def test_what_an_old_leader_still_sends_is_refused(make):
    site = make(1, 2)
    site.held()
    site.until_copied()
    link = site.link(1, "worker", 0)
    link.call("train.lead", {"shard": 0, "epoch": 1}).wait(soon())
    link.close()
    old = site.link(1, "server", 0)
    with pytest.raises(PeerLost, match="does not lead shard 0 any more"):
        old.call("copy.undo", {"shard": 0, "epoch": 0, "model": 1}).wait(soon())
    old.close()


def test_a_new_term_and_an_undone_update_reach_the_copies(make):
    site = make(2, 2)
    held = site.held()
    site.all(lambda w: stepped(held[w], 0, w))
    before = site.training[0].copies.held[0, 1].shard.memory.clone()
    site.all(lambda w: stepped(held[w], 1, w))
    for training in site.training:
        with training._lock:
            training._begin(7)
            training._entered = {0: (7, 0), 1: (7, 0)}
    for shard in range(2):
        calls = [routes[shard].call("train.settle", {"updates": {"1": 1}}) for routes in site.routes]
        for call in calls:
            call.wait(soon())
    leader, copy = (site.training[r].copies.held[0, 1] for r in (0, 1))
    give_up = Deadline.after(20)
    while copy.shard.updates != 1:
        assert not give_up.passed
    assert torch.equal(leader.shard.memory, before)
    assert torch.equal(copy.shard.memory, before)
    assert copy.done == leader.done == {}


@pytest.mark.case("nonfinite: never torn")
def test_an_update_that_is_skipped_moves_nothing_on_any_server_nor_its_copy(make):
    """Worker 1's part of the second update is not finite in one element, which one server holds; later that server ends."""
    site = make(2, 2)
    held = site.held()
    answers = {}

    def step(rank: int, number: int) -> None:
        mine = held[rank]
        flat = grads(number, rank)
        if (rank, number) == (1, 1):
            flat[-1] = float("nan")
        rooms = mine.rooms()
        _, calls = mine.step(
            0, [(RECIPES["adam"], ["a", "b"])], [(flat, mine.runs(["a", "b"], [0, N]))], ["a", "b"], rooms,
            version=number, stop=False, alone=False, clip_norm=0.0, nonfinite="skip",
        )  # fmt: skip
        replies = mine.servers.wait(calls, "a step")
        answers[rank, number] = [reply.head.get("not_finite") for reply in replies]
        assert [mine.named(tuple(pair)) for r in replies for pair in r.head.get("whose", ())] in (
            [],
            [(1, "b")] * 2,
        )
        mine.take(rooms)

    for number in (0, 1):
        assert site.all(lambda w, n=number: step(w, n)) == [None, None]
    assert answers[0, 0] == [None, None]
    assert answers[0, 1] == answers[1, 1] == ["skip", "skip"]
    assert [training.skipped() for training in site.training] == [1, 1]
    check(held, 1)
    site.until_copied()
    site.end(1)
    for mine in held:
        mine.follow()
    assert site.all(lambda w: step(w, 2)) == [None, None]
    params = [x.clone().requires_grad_() for _, x in params_of(1)[0]]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=False)
    for number in (0, 2):
        for p, g in zip(params, (grads(number, 0) + grads(number, 1)).split(N), strict=True):
            p.grad = g
        optimizer.step()
    for mine in held:
        for x, y in zip(mine.params.values(), params, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-13)


def test_strangers_and_workers_cannot_write_copies(make):
    site = make(1, 2)
    site.held()
    link = site.link(1, "worker", 0)
    with pytest.raises(EchelonError, match="which servers offer each other"):
        link.call("copy.undo", {"shard": 0, "epoch": 0, "model": 1}).wait(soon())
    link.close()
