"""A worker of a pipeline whose stages lie in parts is killed in the middle of a step."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from tests.equality import shared_zoo as models
from tests.equality import zoo

run = echelon.init()
torch.set_num_threads(1)
model, dataset = models.make("gpt")
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), models.loader_for(dataset))


def loss(output, y):
    """The last stage's: the others have begun, and wait for its gradients."""
    if run.global_step == 2 and run.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return zoo.mean_ce(output, y)


for batch in loader:
    run.step(loss, models.inputs(batch))
print("came to its end")
