"""Policies under random delays, kills, joins and repeated messages, in a simulated cluster: what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.ps.decisions import Average, Outer
from echelon.ps.eager import Eager
from echelon.ps.ledger import Ledger
from echelon.ps.quorum import Quorum
from echelon.ps.rounds import Rounds
from tests.ps_cluster import DealtCluster, OrderedCluster, Storm

storms = st.builds(
    Storm,
    seed=st.integers(0, 2**32),
    kills=st.integers(0, 6),
    joins=st.integers(0, 2),
    comes_again=st.sampled_from([0.0, 0.5, 1.0]),
    slow=st.dictionaries(st.integers(0, 4), st.sampled_from([3.0, 10.0]), max_size=2),
)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 3))
quick = settings(deadline=None, max_examples=150)


def members(n: int) -> dict[int, int]:
    return dict.fromkeys(range(n), 0)


@pytest.mark.case("ps: the staleness bound is never broken")
@given(sizes, storms, st.integers(0, 4))
@quick
def test_ordered_updates_hold_every_sample_once_and_no_part_is_staler_than_allowed(size, storm, staleness):
    cluster = OrderedCluster(*size, storm, steps=12, staleness=staleness)
    cluster.run()
    cluster.check()
    assert cluster.staleness.max <= staleness
    assert cluster.dropped["stale"] == cluster.dropped["ahead"] == cluster.dropped["stranger"] == 0


@given(sizes, storms)
@quick
def test_bounded_by_zero_applies_what_sync_applies(size, storm):
    storm.kills = storm.joins = 0
    logs = []
    for seed in (storm.seed, storm.seed + 1):
        storm.seed = seed
        cluster = OrderedCluster(*size, storm, steps=6, staleness=0)
        cluster.run()
        logs.append(cluster.servers[0].log)
    assert logs[0] == logs[1], "whatever the order of arrival"
    assert all(update.staleness == (0,) * size[0] for update in logs[0])


@pytest.mark.case("ps: a step is never torn")
def test_a_worker_killed_between_two_servers_completions_undoes_the_first_ones():
    """Of many storms some must hit that moment, or nothing was shown."""
    undone = 0
    for seed in range(60):
        cluster = OrderedCluster(3, 3, Storm(seed, kills=5, comes_again=1.0), steps=10, staleness=0)
        cluster.run()
        cluster.check()
        undone += cluster.undone
    assert undone > 10


def test_slack_hides_a_random_slow_worker_and_cannot_hide_one_that_is_always_slow():
    def seconds(staleness: int, slow: dict[int, float]) -> float:
        total = 0.0
        for seed in range(5):
            cluster = OrderedCluster(4, 1, Storm(seed, slow=slow), steps=40, staleness=staleness)
            cluster.run()
            total += cluster.time.now
        return total

    assert seconds(4, {}) < 0.85 * seconds(0, {})
    assert seconds(4, {1: 5.0}) > 0.8 * seconds(0, {1: 5.0})


@pytest.mark.case("ps: backup drops exactly the late ones")
@given(sizes, storms, st.integers(0, 3), st.sampled_from([0, 0, 2, 7]))
@quick
def test_backup_counts_the_first_parts_and_drops_exactly_the_late_ones(size, storm, backup, aggregate):
    policy = Quorum(members(size[0]), Ledger(), backup=backup, aggregate=aggregate)
    cluster = DealtCluster(policy, size[1], storm, [range(31), range(31, 55)])
    cluster.run()
    cluster.check(list(range(55)))
    assert cluster.staleness.max == 0
    updates = cluster.servers[0].log
    for update in updates:
        came = cluster.order[update.step]
        assert sorted(update.parts, key=came.index) == came[: len(update.parts)], "the first ones"
    late = [part for step, came in cluster.order.items() for part in came[len(updates[step].parts) :]]
    assert sorted(late, key=str) == sorted(cluster.late, key=str), "exactly the others"


@given(st.integers(2, 5), st.integers(0, 2**32))
@quick
def test_without_kills_only_the_end_of_an_epoch_makes_an_update_of_fewer_parts(n, seed):
    policy = Quorum(members(n), Ledger(), backup=1)
    cluster = DealtCluster(policy, 2, Storm(seed, slow={0: 4.0}), [range(40)])
    cluster.run()
    short = [u for u in cluster.servers[0].log if len(u.parts) < n - 1]
    assert len(short) <= 2
    assert all("no other is left" in u.reason for u in short)


@pytest.mark.case("ps: the ledger is complete")
@pytest.mark.case("ps: nobody starves")
@given(sizes, storms)
@quick
def test_async_uses_every_batch_once_and_everybody_who_stays_gets_work(size, storm):
    policy = Eager(members(size[0]), Ledger(), scale_lr=True, compensation=0.1)
    cluster = DealtCluster(policy, size[1], storm, [range(40), range(40, 60)])
    cluster.run()
    cluster.check(list(range(60)))
    assert all(len(u.parts) == 1 for u in cluster.servers[0].log)
    assert cluster.dropped["stale"] == 0
    if not storm.kills and not storm.slow:
        assert all(cluster.grants[rank] >= 3 for rank in range(size[0])), "nobody starves"


@given(sizes, storms, st.integers(1, 4), st.sampled_from([Average(), Outer()]))
@quick
def test_local_rounds_take_up_to_k_batches_each_and_use_every_batch_once(size, storm, local_steps, rule):
    policy = Rounds(members(size[0]), Ledger(), local_steps, rule)
    cluster = DealtCluster(policy, size[1], storm, [range(30), range(30, 47)])
    cluster.run()
    cluster.check(list(range(47)))
    for update in cluster.servers[0].log:
        assert update.rule == rule
        assert all(1 <= len(part.pieces) <= local_steps for part in update.parts)
        assert len({part.worker for part in update.parts}) == len(update.parts)
    assert cluster.staleness.max == 0
    assert cluster.dropped["stale"] == 0, "a round waits for everybody who computes in it"


def test_an_always_slow_worker_holds_up_sync_and_neither_backup_nor_async():
    def seconds(make: Callable[[], Quorum | Eager]) -> tuple[float, float]:
        """Of an epoch, and of an update, over eight seeds."""
        epoch, updates = 0.0, 0
        for seed in range(8):
            cluster = DealtCluster(make(), 1, Storm(seed, slow={0: 3.0}), [range(120)])
            cluster.run()
            epoch += cluster.time.now
            updates += cluster.policy.version
        return epoch / 8, epoch / updates

    sync = seconds(lambda: Quorum(members(4), Ledger()))
    backup = seconds(lambda: Quorum(members(4), Ledger(), backup=1))
    eager = seconds(lambda: Eager(members(4), Ledger()))
    assert backup[0] < sync[0] / 1.35
    assert backup[1] < sync[1] / 1.8
    assert eager[0] < sync[0] / 1.8
