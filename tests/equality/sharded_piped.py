"""sharded,level=1 beside a pipeline: each stage's replicas share its optimizer state. sharded_piped.py OUT"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from tests.equality import split_zoo, zoo

run = echelon.init()
torch.set_num_threads(1)
model, dataset = split_zoo.make("gpt")
opt = torch.optim.AdamW(model.parameters(), lr=0.02)
model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
for _ in run.epochs(zoo.EPOCHS):
    for batch in loader:
        run.step(zoo.mean_ce, batch)
run.save(Path(sys.argv[1]) / "model", model)
torch.save(len(opt.state), Path(sys.argv[1]) / f"rank-{run.rank}.pt")
