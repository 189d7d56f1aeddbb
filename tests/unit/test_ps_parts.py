"""Parts that are held on servers and their copies, behind real Hosts: whoever takes over makes the updates that were decided."""

from __future__ import annotations

import pytest
import torch

from echelon.ps import parts
from echelon.ps.held import Held
from tests.unit.test_ps_copies import RECIPES, Site, check, make
from tests.unit.test_ps_terms import N, grads

__all__ = ["make"]  # a fixture

WORKERS = 2


def offering(site: Site) -> Site:
    """Its servers offer parts, those that are started later as well."""
    start = site.start

    def with_parts(rank: int, leading: bool = False) -> None:
        start(rank, leading)
        offer(rank)

    def offer(rank: int) -> None:
        training = site.training[rank]
        site.hosts[rank].services[parts.NAME] = parts.Parts(training, training.copies)

    for rank in range(site.servers):
        offer(rank)
    site.start = with_parts
    return site


def hold(held: Held, step: int, rank: int, **about) -> None:
    """Worker `rank`'s part of update `step`, to all servers."""
    held.follow()
    runs = held.runs(["a", "b"], [0, N])
    numbers = {"version": step, "stop": False, "alone": True, "clip_norm": 0.0, "mean": False, **about}
    groups = [(RECIPES["adam"], ["a", "b"])]
    _, calls = held.step(0, groups, [(grads(step, rank), runs)], ["a", "b"], None, "part.hold", **numbers)
    held.servers.wait(calls, "parts to be held")


def entry(step: int, workers: int = WORKERS) -> list:
    """All workers' parts make update `step`."""
    return [step, [[rank, step + 1, 1] for rank in range(workers)], 0]


def fold(held: Held, *log: list) -> list[int]:
    """Tells all servers; their numbers of updates."""
    rooms = held.rooms()
    ways = zip(held.servers.links, rooms, strict=True)
    head = {"model": held.model, "log": list(log)}
    replies = held.servers.wait([way.call("part.fold", head, out=[x]) for way, x in ways], "updates")
    held.follow()
    held.take(rooms)
    return [reply.head["updates"] for reply in replies]


def test_a_decided_update_is_made_by_who_takes_over_though_a_worker_of_it_is_gone(make):
    site = offering(make(WORKERS, 2))
    held = site.held()
    for rank in range(WORKERS):
        hold(held[rank], 0, rank)
    assert fold(held[0], entry(0)) == [1, 1]
    site.until_copied()
    for rank in range(WORKERS):
        hold(held[rank], 1, rank)
    for route in site.routes[1]:
        route.close()  # worker 1 is gone, and its part counts
    site.end(0)
    assert fold(held[0], entry(1)) == [2, 2]
    check(held[:1] * WORKERS, 2)


@pytest.mark.parametrize("gone", [0, 1])
def test_an_update_that_one_shard_has_made_is_made_once_on_each(make, gone):
    site = offering(make(WORKERS, 2))
    held = site.held()
    for rank in range(WORKERS):
        hold(held[rank], 0, rank)
    site.until_copied()
    way, head = held[0].servers.links[1], {"model": 1, "log": [entry(0)]}
    held[0].servers.wait([way.call("part.fold", head, out=[held[0].rooms()[1]])], "one shard")
    site.end(gone)
    assert fold(held[1], entry(0)) == [1, 1]
    assert fold(held[0], entry(0)) == [1, 1]
    check(held, 1)


def test_a_copy_that_comes_back_is_filled_with_the_parts_that_are_held(make):
    site = offering(make(WORKERS, 2))
    held = site.held()
    site.until_copied()
    for step, gone in enumerate([0, 1, 0, 1]):
        site.end(gone)
        for rank in range(WORKERS):
            hold(held[rank], step, rank)
        site.start(gone)
        site.until_copied()
        site.end(1 - gone)  # which alone had them when they came
        assert fold(held[0], entry(step)) == [step + 1, step + 1]
        assert fold(held[1], entry(step)) == [step + 1, step + 1]
        site.start(1 - gone)
        site.until_copied()
    check(held, 4)
    for training in site.training:
        assert not any(copy.held for copy in training.copies.held.values())


@pytest.mark.case("nonfinite: never torn")
def test_a_successor_knows_which_updates_were_not_made(make):
    site = offering(make(1, 2))
    (held,) = site.held()
    site.until_copied()
    before = [x.clone() for x in held.params.values()]
    flat = grads(0, 0)
    flat[-1] = float("nan")
    runs, groups = held.runs(["a", "b"], [0, N]), [(RECIPES["adam"], ["a", "b"])]
    about = {"version": 0, "stop": False, "alone": True, "clip_norm": 0.0, "mean": False, "nonfinite": "skip"}
    _, calls = held.step(0, groups, [(flat, runs)], ["a", "b"], None, "part.hold", **about)
    held.servers.wait(calls, "parts to be held")
    assert fold(held, entry(0, 1)) == [1, 1]
    site.end(1)
    head = {"model": 1, "log": [entry(0, 1)]}
    told = held.servers.wait(
        [
            way.call("part.fold", head, out=[x])
            for way, x in zip(held.servers.links, held.rooms(), strict=True)
        ],
        "updates",
    )
    assert [[at, lead, why["not_finite"]] for reply in told for at, lead, why in reply.head["not_made"]] == [
        [0, 0, "skip"],
        [0, 0, "skip"],
    ]
    for x, y in zip(before, held.params.values(), strict=True):
        assert torch.equal(x, y)
