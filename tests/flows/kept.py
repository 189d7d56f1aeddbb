"""A script with everything in it that a stopped run must bring back: what the tests of keeping stop, kill and resume.

kept.py OUT [SECONDS]    OUT gets the digest of everything at the end; a step takes about SECONDS.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import echelon
from tests.runs import averages

EPOCHS, SAMPLES, BATCH = 3, 30, 5


class Noisy(Dataset):
    """Samples that draw: their randomness belongs to them, whoever reads them and when."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return i, torch.randn(4, generator=g) + 0.1 * torch.randn(4), torch.randn(1, generator=g)


def judge(model, batch):
    _, x, y = batch
    time.sleep(PAUSE / 2)
    return {"mse": (F.mse_loss(model(x), y, reduction="sum"), len(y))}


class Best:
    """Tracked: a number of the script's own."""

    value = float("inf")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


out, PAUSE = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
run = echelon.init(ema=0.9)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.AdamW(model.parameters(), 0.02)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)
best = run.track(Best())
loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=1)
val = DataLoader(Noisy(), batch_size=8)
model, opt, sched, loader = run.prepare(model, opt, sched, loader)
for _ in run.epochs(EPOCHS):
    for _, x, y in loader:
        time.sleep(PAUSE)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.log(loss=loss)
    score = run.evaluate(model, val, judge)["mse"]
    if score < best.value:
        best.value = score
        run.save(out / "best")
    sched.step()

parts = {
    "weights": model.state_dict().values(),
    "average": [average for _, average in averages(run, model)],
    "optimizer": [v for state in opt.state.values() for v in state.values()],
    "rate": [torch.tensor(sched.get_last_lr())],
    "best": [torch.tensor(best.value)],
    "random": [torch.rand(3)],
    "step": [torch.tensor(run.global_step)],
}
digests = {
    name: hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]
    for name, tensors in parts.items()
}
(out / f"digest-{run.rank}").write_text(json.dumps(digests))
