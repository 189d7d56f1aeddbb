"""Who leads a shard of the servers' parameters: pure decisions, and the storm of them."""

from __future__ import annotations

import random

import pytest

from echelon.control.roster import partner
from echelon.elastic import leads
from echelon.elastic.leads import Lead


def test_each_shard_lies_on_two_servers():
    assert [partner(s, s, 3) for s in range(3)] == [1, 2, 0]
    assert [partner(s, (s + 1) % 3, 3) for s in range(3)] == [0, 1, 2]
    assert partner(0, 0, 1) == 0


def test_a_server_with_a_whole_copy_takes_over_and_one_without_does_not():
    start = leads.first(3)
    copied = leads.told(start, 0, 0, 0, True)
    assert copied is not None
    after, moves = leads.fell(copied, 0, "server 0 ended")
    assert after[0] == Lead(1, 1)
    assert [move.shard for move in moves] == [0]
    assert after[2] == Lead(2), "it had only a copy of shard 2"
    gone, moves = leads.fell(start, 1, "server 1 ended")
    assert gone[1].lost == "server 1 ended, and no other server had a whole copy of shard 1"
    assert gone[0] == Lead(0)


def test_a_partner_that_fell_has_no_copy_until_the_leader_says_so():
    copied = leads.told(leads.first(2), 0, 0, 0, True)
    after, moves = leads.fell(copied, 1, "x")
    assert (after[0], [m.shard for m in moves]) == (Lead(0, 0, copied=False), [1])
    assert leads.told(after, 0, 0, 0, True)[0].copied


@pytest.mark.parametrize(("rank", "epoch"), [(1, 0), (0, 1), (0, 0)])
def test_who_does_not_lead_is_told_so(rank, epoch):
    moved, _ = leads.fell(leads.told(leads.first(2), 0, 0, 0, True), 0, "x")
    assert moved[0] == Lead(1, 1)
    assert leads.told(moved, 0, rank, epoch, True) is None


def test_leads_survive_the_journal():
    moved, _ = leads.fell(leads.told(leads.first(3), 1, 1, 0, True), 1, "x")
    assert leads.read(leads.to_dict(moved)) == moved


@pytest.mark.case("ps: a copy takes over, and never less than was acknowledged")
@pytest.mark.parametrize("seed", range(200))
def test_no_acknowledged_update_is_ever_lost_to_a_take_over(seed):
    """A model of it: leaders acknowledge updates when their partner has them, or after they told the coordinator to do without."""
    rng = random.Random(seed)
    n = rng.randint(2, 4)
    now = leads.first(n)
    have = {(s, r): 0 for s in range(n) for r in (s, (s + 1) % n)}
    acknowledged = [0] * n
    for _ in range(300):
        shard = rng.randrange(n)
        lead = now[shard]
        if lead.lost:
            continue
        other = partner(shard, lead.rank, n)
        what = rng.random()
        if what < 0.6:  # an update
            have[shard, lead.rank] += 1
            if lead.copied:
                have[shard, other] = have[shard, lead.rank]
            acknowledged[shard] = have[shard, lead.rank]
        elif what < 0.75:  # the partner is filled
            have[shard, other] = have[shard, lead.rank]
            now = leads.told(now, shard, lead.rank, lead.epoch, True) or now
        elif what < 0.85:  # the partner is done without
            now = leads.told(now, shard, lead.rank, lead.epoch, False) or now
        else:
            fallen = rng.randrange(n)
            now, moves = leads.fell(now, fallen, "killed")
            for s in range(n):
                if (s, fallen) in have:
                    have[s, fallen] = 0
            for move in moves:
                if not move.lead.lost:
                    assert have[move.shard, move.lead.rank] >= acknowledged[move.shard]
