"""A new term on the servers: what was under way is void, a torn update did not happen, and everybody goes on from one version."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import PeerLost
from echelon.ps.copies import Copies
from echelon.ps.recipes import Recipe
from echelon.ps.session import Training
from echelon.ps.shard import Shard
from tests.unit.test_ps_session import Site, site, soon

__all__ = ["site"]  # a fixture

ADAM = Recipe.from_plain({"name": "adam", "numbers": {"lr": 0.1}})
N = 1000


def copies(workers: int, names: str = "ab") -> list[list[tuple[str, torch.Tensor]]]:
    g = torch.Generator().manual_seed(3)
    first = [(name, torch.randn(N, generator=g, dtype=torch.float64)) for name in names]
    return [[(name, x.clone()) for name, x in first] for _ in range(workers)]


def many(workers: int, servers: int, site) -> Site:
    made = site(workers, servers)
    for index, host in enumerate(made.hosts):
        training = Training(workers, Copies(index, workers, servers))
        made.training[index] = host.services["train"] = training
    return made


def grads(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2 * N, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def push(held, step, rank):
    return held.push(grads(step, rank), held.runs(["a", "b"], [0, N]))


def stepped(held, step, rank):
    push(held, step, rank)
    held.apply(0, [(ADAM, 1.0, ["a", "b"])], [])


def plain(steps: int, workers: int) -> list[torch.Tensor]:
    params = [x.clone().requires_grad_() for _, x in copies(1)[0]]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=False)
    for step in range(steps):
        total = grads(step, 0)
        for rank in range(1, workers):
            total = total + grads(step, rank)
        for p, g in zip(params, total.split(N), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.case("ps: a step is never torn")
@pytest.mark.parametrize("died", ["before its second apply", "before its pushes"])
def test_a_worker_lost_between_two_servers_completions_leaves_no_trace(site, died):
    made = many(3, 2, site)
    held = made.held(copies(3))
    for step in range(2):
        made.all(lambda r, s=step: stepped(held[r], s, r))
    before = [x.clone() for x in held[0].params.values()]

    def torn(rank: int) -> None:
        if rank < 2:
            stepped(held[rank], 2, rank)
            return
        if died == "before its second apply":
            push(held[2], 2, 2)
        number = held[2].servers.number(1)
        head = {"model": 1, "number": number, "optimizer": 0, "unused": []}
        keys = held[2].keys(["a", "b"])
        if died == "before its second apply":
            links = held[2].servers.links
            groups = [[ADAM.to_plain(), 1.0, keys[0]]]
            links[0].call("train.apply", {**head, "groups": groups}, out=[held[2].pulled[0]]).wait(soon())
        for link in held[2].servers.links:
            link.close()

    errors = made.all(torn)
    assert [type(e) for e in errors[:2]] == [PeerLost, PeerLost]
    versions = [t.copies.held[i, 1].shard.updates for i, t in enumerate(made.training)]
    assert versions == ([3, 2] if died == "before its second apply" else [2, 2])

    made.links[2] = [made.connect(s, 2) for s in range(2)]
    fresh = made_again(made, 2)

    def again(rank: int) -> None:
        mine = held[rank] if rank < 2 else fresh
        mine.servers.enter(5)
        if rank == 2:
            mine.open()
        elif rank == 0:
            mine.bring()
        else:
            mine.gather()

    assert made.all(again) == [None] * 3
    assert [t.copies.held[i, 1].shard.updates for i, t in enumerate(made.training)] == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(held[1].params.values(), before, strict=True))
    fresh.pull()
    everybody = [*held[:2], fresh]
    for step in (2, 3):
        assert made.all(lambda r, s=step: stepped(everybody[r], s, r)) == [None] * 3
    for mine in everybody:
        for x, right in zip(mine.params.values(), plain(4, 3), strict=True):
            torch.testing.assert_close(x, right, rtol=0, atol=1e-14)
    state = everybody[2].state(0, ["a", "b"])
    assert float(state["a"]["step"]) == 4.0


def made_again(made: Site, rank: int):
    from echelon.ps.held import Held
    from echelon.ps.worker import Servers

    strange = [(name, torch.zeros_like(x)) for name, x in copies(1)[0]]
    return Held(Servers(made.links[rank], ["h", "h"]), 1, strange, rank)


def test_who_is_still_in_the_old_term_is_refused_until_it_enters(site):
    made = many(2, 1, site)
    held = made.held(copies(2))
    late, give_up = push(held[1], 0, 1), soon()
    while not made.training[0].copies.held[0, 1].shard.arrived[1].pushes:
        assert not give_up.passed
    first = held[0].servers.links[0].call("train.enter", {"term": 3})
    with pytest.raises(PeerLost, match="term 3 of the run has begun"):
        late[0][2].wait(soon())
    with pytest.raises(PeerLost, match="a term that is over"):
        push(held[1], 0, 1)[0][2].wait(soon())
    held[1].servers.links[0].call("train.enter", {"term": 3}).wait(soon())
    assert first.wait(soon()).head == {"updates": {"1": 0}}
    with pytest.raises(PeerLost, match="term 2 is over"):
        held[1].servers.links[0].call("train.enter", {"term": 2}).wait(soon())


def test_the_connection_of_an_earlier_incarnation_may_end_late(site):
    made = many(2, 1, site)
    held = made.held(copies(2))
    assert made.all(lambda r: held[r].servers.enter(2)) == [None] * 2
    newer = made.training[0]
    newer._entered[1] = (2, 1)  # its successor entered
    made.links[1][0].close()
    give_up = soon()
    while made.hosts[0].counters.connections > 1:
        assert not give_up.passed
    assert newer.together.lost is None


@pytest.mark.parametrize("keeps", [True, False])
def test_an_update_is_undone_to_the_bit_also_the_first_and_only_the_last(keeps):
    memory = torch.randn(64, dtype=torch.float64).view(torch.uint8)
    shard = Shard([(0, 0, 32, "float64"), (1, 256, 32, "float64")], memory, 1, keeps=True)
    groups = [(ADAM, 1.0, [0, 1])] if keeps else [(ADAM, 1.0, [1])]
    g = torch.randn(32, dtype=torch.float64)
    for _ in range(3):
        before = shard.memory.clone()
        told, arrays = shard.state(0, [0, 1])
        arrays = [x.clone() for x in arrays]
        shard.step(0, groups, lambda key, out: g)
        assert not torch.equal(shard.memory, before)
        shard.undo()
        assert torch.equal(shard.memory, before)
        again, now = shard.state(0, [0, 1])
        assert again == told
        assert all(torch.equal(a, b) for a, b in zip(arrays, now, strict=True))
        with pytest.raises(Exception, match="not kept"):
            shard.undo()
        shard.step(0, groups, lambda key, out: g)
    plain = Shard(shard.spec, memory, 1)
    for _ in range(3):
        plain.step(0, groups, lambda key, out: g)
    assert torch.equal(plain.memory, shard.memory)
