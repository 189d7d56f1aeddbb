"""What follows from a lost step: a table."""

from __future__ import annotations

from echelon.elastic.policy import Replay, Stop, after_loss
from echelon.errors import LoopError, PeerLost
from echelon.faults import ON_PURPOSE


def test_a_loss_on_purpose_is_replayed():
    assert after_loss((), ON_PURPOSE, {}, 0, 3) == Replay()


def test_who_left_the_loop_is_named_and_is_the_cause():
    found = after_loss((1,), "closed", {1: {"state": "left", "step": 2}}, 0, 3)
    assert isinstance(found, Stop)
    assert isinstance(found.error, LoopError)
    assert not found.error.consequence
    assert "worker 1 left the loop after step 2, while worker 0 was in step 3" in str(found.error)


def test_a_dead_peer_is_a_consequence():
    found = after_loss((2,), "closed", {2: {"state": "dead", "step": 2}}, 0, 3)
    assert isinstance(found, Stop)
    assert isinstance(found.error, PeerLost)
    assert found.error.consequence
    assert "worker 2 is gone" in str(found.error)
    unknown = after_loss((), "closed", {}, 0, 3)
    assert isinstance(unknown, Stop)
    assert "step 3 did not meet: closed" in str(unknown.error)
