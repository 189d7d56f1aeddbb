"""Iterations of several optimizer steps, undone on servers: what did not happen, the version to go back to, and copies of it."""

from __future__ import annotations

import random

import pytest
import torch

from echelon.errors import PeerLost, UsageError, WorldError
from echelon.ps import undoing
from echelon.ps.copies import Copies, Copy
from echelon.ps.held import Held
from echelon.ps.recipes import Recipe
from echelon.ps.shard import Shard
from echelon.ps.steps import Updates
from tests.unit.test_ps_copies import make
from tests.unit.test_ps_session import site, soon
from tests.unit.test_ps_terms import ADAM, N, copies, grads, made_again, many

__all__ = ["make", "site"]  # fixtures

SPEC = [(0, 0, 32, "float64"), (1, 256, 32, "float64"), (2, 512, 32, "float64")]


def told(updates: int, *since: int) -> dict:
    return {"updates": {"1": updates}, **({"since": {"1": list(since)}} if since else {})}


@pytest.mark.case("ps: a lost iteration of several steps leaves no trace")
@pytest.mark.parametrize(
    ("servers", "void", "target"),
    [
        ([told(3), told(3)], None, 3),
        ([told(3), told(2)], None, 2),  # one step, which a server lacks
        ([told(3), told(3)], 7, 3),  # nothing was stepped in the lost iteration
        ([told(3, 7, 1), told(3, 7, 1)], 7, 2),  # all have made the first of its steps
        ([told(3, 7, 1), told(2, 6, 1)], 7, 2),  # one has
        ([told(5, 7, 3), told(4, 7, 2)], 7, 2),  # several steps, and the last one torn
        ([told(3, 6, 1), told(3, 6, 1)], 7, 3),  # the last update is of an iteration that is over
        ([told(3, 7, 1), told(2)], 7, 2),  # undone already, in a term that ended early
        ([told(3, 7, 1), told(3, 7, 1)], None, 3),  # a worker was lost in a call after it
        ([told(1, 0, 1), told(0)], 0, 0),  # the very first
    ],
)
def test_what_every_server_goes_back_to(servers, void, target):
    assert undoing.targets(servers, void) == {"1": target}
    assert undoing.targets(servers[::-1], void) == {"1": target}


def test_a_model_that_some_servers_do_not_know_yet_is_left_out():
    assert undoing.targets([{"updates": {"1": 2, "2": 0}}, {"updates": {"1": 2}}], None) == {"1": 2}
    assert undoing.targets([{"updates": {"1": 2}}, {"updates": {"1": 2, "2": 0}}], None) == {"1": 2}


def shard(keeps: bool = True) -> Shard:
    memory = torch.randn(96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Shard(SPEC, memory.view(torch.uint8), 1, keeps=keeps)


def state(held: Shard) -> list:
    """Everything that an update may change."""
    told = [[optimizer, *held.state(optimizer, [0, 1, 2])] for optimizer in range(3)]
    return [held.memory.clone(), held.updates, [[o, t, [x.clone() for x in xs]] for o, t, xs in told]]


def same(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


NAMES = {
    0: Recipe.from_plain({"name": "adam", "numbers": {"lr": 0.1}}),
    1: Recipe.from_plain({"name": "sgd", "numbers": {"lr": 0.1, "momentum": 0.9}}),
    2: Recipe.from_plain({"name": "rmsprop", "numbers": {"lr": 0.1, "momentum": 0.5}}),
}


def update(held: Shard, rng: random.Random, since: int | None) -> None:
    optimizer = rng.randrange(3)
    keys = rng.sample([0, 1, 2], rng.randint(1, 3))
    g = torch.randn(32, generator=torch.Generator().manual_seed(rng.randrange(10**6)), dtype=torch.float64)
    held.step(optimizer, [(NAMES[optimizer], 1.0, keys)], lambda key, _: g, since=since)


@pytest.mark.case("ps: a lost iteration of several steps leaves no trace")
@pytest.mark.parametrize("keeps", [True, False], ids=["several servers", "one server"])
@pytest.mark.parametrize("seed", range(20))
def test_random_iterations_undone_and_made_again_give_the_same_bits(keeps, seed):
    rng = random.Random(seed)
    calm, stormy = shard(False), shard(keeps)
    for iteration in range(8):
        before, plan = state(stormy), rng.randrange(10**9)
        number = rng.randint(1, 4)
        for _ in range(rng.randint(0, 2)):  # lost after some of its updates
            lost, part = random.Random(plan), rng.randint(1, number)
            for _ in range(part):
                update(stormy, lost, iteration)
                if rng.random() < 0.3:  # the script writes into parameters itself
                    stormy.overwrite(stormy.memory * 0, "worker 0")
            assert stormy.open == (iteration, part)
            stormy.undo()
            assert stormy.open is None
            assert same(state(stormy), before)
            with pytest.raises(UsageError, match="not kept"):
                stormy.undo()
        for held in (calm, stormy):
            made = random.Random(plan)
            for _ in range(number):
                update(held, made, None if held is calm else iteration)
    assert same(state(stormy), state(calm))


def test_without_several_steps_nothing_more_is_kept():
    held = shard(False)
    update(held, random.Random(1), None)
    assert held.before is None
    assert held.open is None
    kept = shard()
    update(kept, random.Random(1), None)
    assert kept.open is None
    assert "before" not in kept.snapshot()[0]


def test_a_state_that_was_loaded_in_between_cannot_be_undone_and_that_is_said():
    held = shard()
    update(held, random.Random(1), 4)
    held.load(0, {0: NAMES[0]}, [], [])
    update(held, random.Random(2), 4)
    assert held.open == (4, 2)
    copy = Copy(held, Updates(held))
    assert undoing.needed(copy, 0, "it")
    with pytest.raises(UsageError, match="not kept"):
        held.undo()
    update(held, random.Random(2), 5)
    held.undo()
    assert held.updates == 2


def test_a_server_that_cannot_come_to_the_others_version_says_so():
    held = shard()
    for _ in range(2):
        update(held, random.Random(1), 4)
    copy = Copy(held, Updates(held))
    assert not undoing.needed(copy, 2, "it")
    assert undoing.needed(copy, 0, "it")
    with pytest.raises(WorldError, match="shard 0 of model 1 is at update 2, others at 1"):
        undoing.needed(copy, 1, "shard 0 of model 1")


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_that_is_filled_in_mid_iteration_can_undo_it_as_well(seed):
    rng = random.Random(seed)
    leader = shard()
    for iteration in range(3):
        for _ in range(rng.randint(1, 3)):
            update(leader, rng, iteration)
    before = state(leader)
    for _ in range(rng.randint(1, 3)):
        update(leader, rng, 3)
    head, tensors = leader.snapshot()
    copy = Copies(1, 1, 2).make(head["ranges"], tensors[0]).shard
    copy.restore(head, tensors)
    assert same(state(copy), state(leader))
    assert copy.open == leader.open
    for held in (leader, copy):
        update(held, random.Random(9), 3)
        held.undo()
        assert same(state(held), before)
        update(held, random.Random(8), 3)
    assert same(state(copy), state(leader))


# -- behind real hosts -------------------------------------------------------------------------------------------


def stepped(held: Held, step: int, rank: int, name: str, since: int) -> None:
    """One of two optimizers over one model: each steps one of its tensors."""
    held.follow()
    held.push(grads(step, rank)[:N], held.runs([name], [0]))
    held.apply("ab".index(name), [(ADAM, 1.0, [name])], [], since=since)


def plain(steps: int, workers: int) -> list[torch.Tensor]:
    params = [x.clone().requires_grad_() for _, x in copies(1)[0]]
    made = [torch.optim.Adam([p], lr=0.1, foreach=False) for p in params]
    for step in range(steps):
        for p, optimizer in zip(params, made, strict=True):
            total = grads(step, 0)[:N].clone()
            for rank in range(1, workers):
                total += grads(step, rank)[:N]
            p.grad = total
            optimizer.step()
    return [p.detach() for p in params]


def right(held: list[Held], steps: int) -> None:
    for mine in held:
        for x, y in zip(mine.params.values(), plain(steps, len(held)), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.case("ps: a lost iteration of several steps leaves no trace")
@pytest.mark.parametrize(
    ("servers", "torn"), [(1, False), (2, False), (2, True)], ids=["one server", "two servers", "torn"]
)
def test_a_worker_lost_after_the_first_step_of_an_iteration(site, servers, torn):
    made = many(3, servers, site)
    held = made.held(copies(3))
    for step in range(2):
        made.all(lambda r, s=step: [stepped(held[r], s, r, name, s) for name in "ab"] and None)
    before = [x.clone() for x in held[0].params.values()]
    assert made.all(lambda r: stepped(held[r], 2, r, "a", 2)) == [None] * 3

    def second(rank: int) -> None:
        if rank < 2:
            stepped(held[rank], 2, rank, "b", 2)
            return
        if torn:  # one of two servers has all of its calls
            held[2].push(grads(2, 2)[:N], held[2].runs(["b"], [0]))
            number, keys = held[2].servers.number(1), held[2].keys(["b"])
            head = {"model": 1, "number": number, "optimizer": 1, "unused": [], "since": 2}
            groups = [[ADAM.to_plain(), 1.0, keys[0]]]
            link = held[2].servers.links[0]
            link.call("train.apply", {**head, "groups": groups}, out=[held[2].pulled[0]]).wait(soon())
        for link in held[2].servers.links:
            link.close()

    errors = made.all(second)
    assert [type(e) for e in errors[:2]] == [PeerLost, PeerLost]
    made.links[2] = [made.connect(s, 2) for s in range(servers)]
    fresh = made_again(made, 2)
    everybody = [*held[:2], fresh]

    def again(rank: int) -> None:
        everybody[rank].servers.enter(5, void=2)
        if rank == 2:
            fresh.open()
        everybody[rank].pull()

    assert made.all(again) == [None] * 3
    assert [t.copies.held[i, 1].shard.updates for i, t in enumerate(made.training)] == [4] * servers
    for mine in everybody:
        assert all(torch.equal(a, b) for a, b in zip(mine.params.values(), before, strict=True))
    for step in (2, 3):
        done = made.all(lambda r, s=step: [stepped(everybody[r], s, r, name, s) for name in "ab"] and None)
        assert done == [None] * 3
    right(everybody, 4)


@pytest.mark.case("ps: a lost iteration of several steps leaves no trace")
@pytest.mark.parametrize("lost", [(), (0,), (1,)], ids=["nobody", "server 0", "server 1"])
def test_an_iteration_is_undone_by_whoever_leads(make, lost):
    """Servers end in mid-iteration; one that was started again in between has what it needs as well."""
    site = make(2, 2)
    held = site.held()
    site.all(lambda w: [stepped(held[w], 0, w, name, 0) for name in "ab"] and None)
    assert site.all(lambda w: stepped(held[w], 1, w, "a", 1)) == [None, None]
    for gone in lost:  # and then the one that took over
        for each in (gone, 1 - gone):
            site.until_copied()
            site.end(each)
            assert site.all(lambda w: stepped(held[w], 9, w, "a", 1)) == [None, None]
            site.start(each)
    site.until_copied()
    assert site.all(lambda w: held[w].void(1)) == [None, None]
    assert site.all(lambda w: held[w].void(1)) == [None, None]  # what comes twice changes nothing
    assert site.all(lambda w: held[w].follow()) == [None, None]
    assert site.all(lambda w: held[w].pull()) == [None, None]
    right(held, 1)
    for step in (1, 2):
        for name in "ab":
            assert site.all(lambda w, s=step, n=name: stepped(held[w], s, w, n, s)) == [None, None]
    right(held, 3)
