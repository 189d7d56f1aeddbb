"""One worker of uneven_pipeline.py, started by `echelon run`: enters its control group, then trains under each split in turn.

uneven_pipeline_worker.py FOLDER ROUNDS SPEEDS ENTRY…; rank 0 leaves FOLDER/times.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import build
from echelon.run import Run
from echelon.strategy import merge, parse

sys.path.insert(0, str(Path(__file__).parent))
import turns
from models import Pair

BLOCKS, WIDTH, ROWS = 20, 128, 1920
ROUND_S = 0.5


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def stepper(first: Run, text: str) -> turns.Step:
    """A script under this strategy, on the workers of the first run."""
    strategy = merge(parse(text))
    world = build.arrange(first.world.groups, first.place, strategy)
    run = Run(first.place, strategy, None, first.emit, world=world)
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(WIDTH, 4 * WIDTH) for _ in range(BLOCKS)))
    data = TensorDataset(torch.randn(2 * ROWS, WIDTH), torch.randint(0, WIDTH, (2 * ROWS,)))
    _, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.001), DataLoader(data, batch_size=ROWS)
    )
    feed = forever(loader)
    return lambda: run.step(turns.mean_loss, next(feed))


def main() -> None:
    folder, rounds, speeds = Path(sys.argv[1]), int(sys.argv[2]), [int(s) for s in sys.argv[3].split(",")]
    first = echelon.init()
    torch.set_num_threads(1)
    at = round(BLOCKS * sum(speeds[:3]) / sum(speeds))
    micros = f"microbatches={first.strategy.microbatches}"
    texts = {
        "echelon": f"pipeline=3+1,{micros},cut={at}",
        "even": f"data=2,pipeline=2,microbatches={first.strategy.microbatches // 2},cut={BLOCKS // 2}",
        "pipeline=4": f"pipeline=4,{micros},cut={BLOCKS // 4}+{BLOCKS // 2}+{3 * BLOCKS // 4}",
        "data=4": "data=4",
    }
    sides = {side: stepper(first, text) for side, text in texts.items()}
    Path(sys.argv[4 + first.rank]).write_text(str(os.getpid()))
    losses = {side: [step().item() for _ in range(4)] for side, step in sides.items()}
    count = turns.steps_a_round(sides["even"], ROUND_S)
    found = turns.in_turn(sides, rounds, count)
    turns.tell(folder, found, steps_a_round=count, same_losses=turns.alike(losses), cut=at, losses=losses)


main()
