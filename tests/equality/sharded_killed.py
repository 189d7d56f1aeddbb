"""A worker of a sharded run is killed in its forward. sharded_killed.py LEVEL"""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from tests.equality import split_zoo, zoo

run = echelon.init()
torch.set_num_threads(1)
model, dataset = split_zoo.make("gpt")
model, opt, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), zoo.loader_for(dataset))
for batch in loader:
    if run.global_step == 2 and run.rank == 1:
        model.blocks[1].register_forward_pre_hook(lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    split_zoo.loss_of(model, batch).backward()
    opt.step()
    opt.zero_grad()
print("came to its end")
