"""Every service of a training server against a member of the run that sends nonsense: it alone is told, and the others train on."""

from __future__ import annotations

import random

import pytest
import torch

from echelon.clock import Deadline
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, Late
from echelon.ps import copies, dealing, judge, local, parts, session
from echelon.ps.link import Link
from tests.unit.test_ps_session import RUN, TOKEN, Site, soon
from tests.unit.test_ps_terms import copies as params_of
from tests.unit.test_ps_terms import plain, stepped

VERBS = {
    "train": ["sum", "open", "push", "back", "squares", "apply", "step", "values", "pull", "state", "load", "settle", "lead"],
    "copy": ["fill", "update", "values", "load", "undo", "begin", "hold", "pass", "note", "nothing"],
    "deal": ["take", "idle", "done", "leave", "end", "state", "states", "part", "catch_up", "hello", "rejoin", "meet"],
    "part": ["hold", "fold"],
    "local": ["open", "meet", "add", "gather", "state"],
    "judge": ["report"],
    "nobody": ["there"],
}  # fmt: skip
WORDS = [
    "model", "shard", "epoch", "number", "keys", "groups", "optimizer", "unused", "alone", "version", "stop", "clip_norm", "used", "push",
    "pushes", "ranges", "replicas", "states", "updates", "next", "done", "recipes", "state", "feed", "low", "above", "total", "idle", "pieces",
    "backup", "aggregate", "count", "begins", "question", "record", "part", "worker", "told", "held", "not_made", "turns", "live", "epochs", "meeting", "log", "place", "rule", "update", "squares", "mean",
]  # fmt: skip


def nonsense(rng: random.Random, depth: int = 0) -> object:
    kinds = [
        lambda: rng.choice([0, 1, -1, 2**31, -(2**62), 7]),
        lambda: rng.choice([0.0, float("nan"), float("inf"), -1.5]),
        lambda: rng.choice(["", "x", "sgd", "float32", "\0" * 9]),
        lambda: None,
        lambda: rng.choice([True, False]),
    ]
    if depth < 3:
        kinds += [lambda: [nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]] * 3
        kinds += [lambda: {rng.choice(WORDS): nonsense(rng, depth + 1) for _ in range(rng.randrange(3))}]
    return rng.choice(kinds)()


@pytest.mark.case("ps: garbage of a worker is told to it alone")
@pytest.mark.parametrize("role", ["worker", "server"])
def test_nonsense_in_every_verb_harms_nobody(role):
    """The nonsense comes as worker 2 or as a server; workers 0 and 1 train on another host's model meanwhile."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    site = Site(2, 1, True)
    held = site.training[0].copies
    services = site.hosts[0].services
    services[copies.NAME] = copies.Copying(held)
    services[dealing.NAME] = dealing.Dealing(3)
    services[parts.NAME] = parts.Parts(site.training[0], held)
    services[local.NAME] = local.Local(3)
    services[judge.NAME] = judge.Judge(1)
    strangers = session.Training(3, copies.Copies(0, 3, 1))  # what worker 2 can reach has three workers
    made = site.held(params_of(2))
    link = Link.connect(site.hosts[0].address, TOKEN, Identity(RUN, role, 2, 0), soon())
    told = refused = 0
    try:
        for turn in range(1500):
            services["train"] = strangers if role == "worker" and turn % 2 else site.training[0]
            name = rng.choice(list(VERBS))
            head = {word: nonsense(rng) for word in rng.sample(WORDS, rng.randrange(len(WORDS)))}
            payload = [torch.zeros(rng.randrange(5)) for _ in range(rng.randrange(3))]
            try:
                link.call(f"{name}.{rng.choice(VERBS[name])}", head, payload).wait(Deadline.after(0.002))
                told += 1
            except Late:
                pass  # it waits for others
            except EchelonError:
                refused += 1
            assert link.lost is None, link.lost
        assert refused > 300, (told, refused)
    finally:
        services["train"] = site.training[0]
        link.close()
    if role == "server":  # a worker that is gone ends sync
        for step in range(3):
            assert site.all(lambda r, s=step: stepped(made[r], s, r)) == [None, None]
        for mine in made:
            for x, y in zip(mine.params.values(), plain(3, 2), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    site.close()
