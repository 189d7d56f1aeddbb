"""A script that trains while its run's processes are killed: FOLDER EPOCHS PAUSE_S. Notes when each step ended, and the last weights."""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import echelon
from tests.runs import values_come_behind

values_come_behind()
folder, epochs, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
run = echelon.init()
g = torch.Generator().manual_seed(5)
x = torch.randn(500, 20, generator=g, dtype=torch.float64)
y = x @ torch.randn(20, 1, generator=g, dtype=torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32 * epochs)
model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
with open(folder / f"times-{run.rank}", "a") as times:
    for _ in run.epochs(epochs):
        for a, b in loader:
            optimizer.zero_grad()
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            scheduler.step()
            print(time.monotonic(), file=times, flush=True)
            time.sleep(pause_s)
if run.is_main:
    torch.save(model.state_dict(), folder / "weights.pt")
