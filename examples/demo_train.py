"""What the demo trains: which letter follows 16 letters of Python's documentation. Both loops are here to compare.

python demo_train.py --torch              the loop in PyTorch alone: the answer
python demo_train.py                      the same with Echelon, one process
echelon run --workers 2 demo_train.py     two; run.step is the loop for every strategy, also where the model is split
"""

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--torch", action="store_true", help="without Echelon")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=512, help="samples the loader yields at once")
parser.add_argument("--save", default="demo.safetensors")
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

text = "".join(topics[name] for name in sorted(topics))[:24_000]
alphabet = sorted(set(text))
windows = torch.tensor([alphabet.index(letter) for letter in text]).unfold(0, 17, 1)
samples = TensorDataset(windows[:, :16], windows[:, 16])
loader = DataLoader(samples, args.batch, shuffle=True, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(
    nn.Embedding(len(alphabet), 32), nn.Flatten(), nn.Linear(16 * 32, 256), nn.Tanh(),
    nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, len(alphabet)),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * -(-len(samples) // 512))


def train_with_torch():
    steps = 0
    for _ in range(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def train_with_echelon(run):
    run.prepare(model, optimizer, scheduler)
    prepared = run.prepare(loader)
    for _ in run.epochs(args.epochs):
        for x, y in prepared:
            loss = run.step(F.cross_entropy, (x, y), clip_norm=1.0)
            scheduler.step()
            run.log(loss=loss)
    return run.global_step


def loss_sum(model, batch):
    x, y = batch
    return {"loss": (F.cross_entropy(model(x), y, reduction="sum"), len(y))}


if args.torch:
    from safetensors.torch import save_file

    began = time.perf_counter()
    steps = train_with_torch()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        loss = loss_sum(model, samples[:])["loss"][0].item() / len(samples)
    save_file(model.state_dict(), args.save)
else:
    import echelon

    run = echelon.init()
    began = time.perf_counter()
    steps = train_with_echelon(run)
    seconds = time.perf_counter() - began
    loss = run.evaluate(model, DataLoader(samples, 1024), loss_sum)["loss"]
    run.save(args.save)
if args.torch or run.is_main:
    print(f"loss {loss:.6f} over all samples after {steps} steps")
    facts = {"steps": steps, "seconds": seconds, "samples": args.epochs * len(samples), "loss": loss}
    Path(args.save).with_suffix(".json").write_text(json.dumps(facts))
