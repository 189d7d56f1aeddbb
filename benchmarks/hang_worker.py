"""A training script that hangs on purpose, or that only looks as if: see hangs.py.

hang_worker.py KIND RANK STEP           at STEP, worker RANK hangs in the way of KIND
hang_worker.py quiet SECONDS SEED       no hang: uneven steps, evaluations, phases, saves
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import echelon

KIND, REST = sys.argv[1], sys.argv[2:]
BATCH = 6
FOREVER_S = 3600.0


class Samples(Dataset):
    """Rows of noise; the sample at which the hang begins never comes."""

    def __init__(self, length: int, hang_at: int | None = None) -> None:
        self.length, self.hang_at = length, hang_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.hang_at is not None and index >= self.hang_at:
            told()
            time.sleep(FOREVER_S)
        if KIND == "quiet" and random.random() < 0.01:
            time.sleep(random.random() * 2)
        return torch.randn(8), torch.randn(2)


def told() -> None:
    """Leaves the moment of the hang for the judge."""
    print(f"hang begins {time.time()}", flush=True)


def hang(kind: str, run: echelon.Run) -> None:
    """Never comes back, but for those that only leave the common path."""
    told()
    if kind == "sleep":
        time.sleep(FOREVER_S)
    elif kind == "spin":
        while True:
            pass
    elif kind == "gil":
        re.match(r"(a+)+$", "a" * 64 + "b")  # backtracks for centuries in C, with the GIL
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "extra":
        run.reduce(1.0, "sum")  # the others do not
    elif kind == "barrier":
        torch.distributed.barrier()
    elif kind == "left":
        threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()  # its process stays
        sys.exit(0)


def train(run: echelon.Run) -> None:
    kind, rank, step = KIND, int(REST[0]), int(REST[1])
    mine = run.rank == rank
    at = step * BATCH if mine and kind in ("getitem", "loader") else None
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    loader = DataLoader(Samples(4000, at), batch_size=BATCH, num_workers=2 if kind == "loader" else 0)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if run.global_step == step:
            if kind == "different":
                told()
                if mine:
                    run.reduce(torch.ones(100), "sum")
                else:
                    with run.phase("only the others"):
                        time.sleep(1)
            elif mine:
                hang(kind, run)


def quiet(run: echelon.Run) -> None:
    """Uneven in every way that is no hang."""
    until, seed = time.monotonic() + float(REST[0]), int(REST[1])
    alike, own = random.Random(seed), random.Random(seed * 1000 + run.rank)
    random.seed(own.random())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    train_set = DataLoader(Samples(600), batch_size=BATCH, num_workers=1)
    held_out = DataLoader(Samples(120), batch_size=BATCH)
    model, optimizer, loader, tests = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), train_set, held_out
    )
    folder = Path(tempfile.mkdtemp())

    def judge(model, batch):
        time.sleep(own.random() * 0.3)
        return {
            "loss": (
                float(torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")),
                len(batch[0]),
            )
        }

    over = 0.0
    while not over:
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            what = alike.random()
            time.sleep(alike.random() * 2 * (alike.random() < 0.3))  # equal
            time.sleep(own.random() * 2 * (own.random() < 0.3))  # unequal
            if what < 0.05:
                run.evaluate(model, tests, judge)
            elif what < 0.08:
                with run.phase("tokenize") as phase:
                    for i in range(10):
                        phase.progress(i / 10)
                        time.sleep(own.random() * 2)
            elif what < 0.09:
                with run.phase("a long one that says nothing"):
                    time.sleep(45)
            elif what < 0.12:
                run.save(folder / "model")
            elif what < 0.15:
                time.sleep(own.random() * 8)  # almost too long
            elif what < 0.17:
                torch.randn(400, 400).matmul(torch.randn(400, 400)).det()
            over = run.reduce(float(time.monotonic() > until), "max")
            if over:
                break
    run.print(f"quiet for {run.global_step} steps")


if __name__ == "__main__":
    (quiet if KIND == "quiet" else train)(echelon.init())
