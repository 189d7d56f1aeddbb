"""The Group contract over torch.distributed, run by `echelon run`; then what a dead peer looks like."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import echelon
from echelon.clock import Deadline
from echelon.comm.group import Lost
from tests.contract.group_contract import CHECKS
from tests.runs import group_of

backend = sys.argv[2]
run = echelon.init(backend=backend)
dies = "die" in sys.argv
for group, checks in ((group_of(run), CHECKS), (group_of(run, "values"), CHECKS[:2])):
    for check in checks[:1] if dies else checks:
        check(group)
Path(sys.argv[1], f"met-{run.rank}").touch()
if dies:
    group = group_of(run)
    if run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    outcome = group.all_reduce(torch.ones(10)).wait(Deadline.after(20))
    assert isinstance(outcome, Lost), outcome
    assert time.monotonic() - began < 5
    assert isinstance(group.all_reduce(torch.ones(10)).wait(Deadline.after(1)), Lost), (
        "a lost group stays lost"
    )
    Path(sys.argv[1], f"lost-{run.rank}").write_text(repr(outcome.peers))
