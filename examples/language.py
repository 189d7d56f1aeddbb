"""A small GPT learns to write like Python's own documentation, letter by letter (pydoc_data, part of every Python).

python language.py
echelon run --workers 2 language.py
"""

import argparse
import textwrap
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import echelon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--letters", type=int, default=200_000, help="how much of the text to read")
parser.add_argument("--batch", type=int, default=16, help="windows of text a step, over all workers")
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)
WINDOW, WIDTH, HEADS, LAYERS = 32, 64, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix, self.norm2 = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, letters, bias=False)
        self.out.weight = self.letter.weight  # tied
        self.apply(lambda m: isinstance(m, nn.Embedding) and nn.init.normal_(m.weight, std=0.05))

    def forward(self, ids):
        return self.out(self.norm(self.blocks(self.letter(ids) + self.place.weight[: ids.shape[1]])))


run = echelon.init()
text = " ".join(w for name in sorted(topics) for w in topics[name].split() if w.strip("=*-~^"))
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(letter) for letter in text[: args.letters]])
windows = [(w[:-1], w[1:]) for w in ids.unfold(0, WINDOW + 1, WINDOW)]  # what is read, what comes next
loader = DataLoader(windows, args.batch, shuffle=True)
model = GPT(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, args.epochs * len(loader), pct_start=0.1)
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
for _ in run.epochs(args.epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = run.clip_grad_norm(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(loss=loss, norm=norm)
run.print(f"loss {run.reduce(loss.detach()):.4f} after {run.global_step} steps; saved {run.save('language')}")
with run.phase("write"), torch.no_grad():  # on rank 0
    written = ids[:1].tolist()
    for _ in range(300):
        out = model(torch.tensor([written[-WINDOW:]], device=run.device))[0, -1] / 0.7
        written += torch.multinomial(out.softmax(0), 1).tolist()
    print(textwrap.fill("".join(alphabet[i] for i in written), 72))
