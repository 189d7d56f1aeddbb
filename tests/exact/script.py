"""A script as people write it, that is killed or stopped on its way: script.py FAULT; leaves a checkpoint of its end.

FAULT "kill": worker 1 is killed in its first life, after step 4. "stop": the run is asked to stop there, unless it is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.clock import Deadline
from tests.equality import zoo
from tests.runs import is_asked_to_stop

AT, LIMIT_S = 4, 60.0


def until(condition) -> None:
    deadline, pause = Deadline.after(LIMIT_S), threading.Event()
    while not condition():
        assert not deadline.passed, f"not within {LIMIT_S} s"
        pause.wait(0.01)


def has_begun(run) -> bool:
    """Does the supervisor know that the run trains? Before that a killed worker ends it."""
    lines = (run.run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return any(event["event"] == "Beat" and event["step"] > 0 for event in events)


def killed(run) -> None:
    until(lambda: has_begun(run))
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(run) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: is_asked_to_stop(run))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fault, once = {"kill": killed, "stop": stopped}[sys.argv[1]], Path("once")
    run = echelon.init()
    model, dataset = zoo.make("cnn")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, zoo.loader_for(dataset))
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            zoo.mean_ce(model(x), y).backward()
            run.clip_grad_norm(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if run.global_step == AT and run.rank == 1 and not once.exists():
                once.touch()
                fault(run)
    run.checkpoint().wait()


if __name__ == "__main__":
    main()
