"""What a worker's beat says of its time: waiting for others is counted where it was waited."""

from __future__ import annotations

import time

import torch
from torch import nn

from tests.runs import runs_among_threads

LATE_S = 0.2


def test_who_waits_for_a_late_worker_says_for_how_long():
    def act(run):
        model = nn.Linear(2, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            time.sleep(LATE_S * run.rank)
            model(torch.ones(2, 2)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.beat().wait_s

    first, late = runs_among_threads(2, act)
    assert first > 1.5 * LATE_S
    assert 0 <= late < first
