"""A worker that is gone in a call outside of a step: nobody takes its own part for the answer of all."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from echelon.errors import PeerLost
from tests.runs import runs_among_threads

CALLS = {
    "reduce": lambda run: run.reduce(1.0, "sum"),
    "gather": lambda run: run.gather(torch.ones(2)),
    "evaluate": lambda run: run.evaluate(
        torch.nn.Linear(1, 1), DataLoader([torch.ones(1)] * 4), lambda model, batch: {"n": (1.0, 1)}
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_peer_is_gone_raises_instead_of_giving_what_is_here(call):
    raised = []

    def act(run):
        if run.rank == 1:
            raise RuntimeError("worker 1 ends here")
        with pytest.raises(PeerLost, match="a call after step 0 did not meet"):
            CALLS[call](run)
        raised.append(call)

    with pytest.raises(RuntimeError, match="ends here"):
        runs_among_threads(2, act)
    assert raised == [call]
