"""Handwritten digits (8×8 pixels, they come with scikit-learn) read by a small ResNet.

python images.py
echelon run --workers 4 images.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import echelon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=64, help="images a step, over all workers")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        shorter = [nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.around = nn.Sequential(*shorter if stride > 1 else [])

    def forward(self, x):
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inside)) + self.around(x))


def resnet(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def count_right(model, batch):
    x, y = batch
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


run = echelon.init()
x, y = load_digits(return_X_y=True)
x = torch.tensor(x / 16).to(torch.get_default_dtype()).view(-1, 1, 8, 8)
images = TensorDataset(x, torch.tensor(y))
seen, unseen = random_split(images, [1500, len(images) - 1500], torch.Generator().manual_seed(0))

model = resnet()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
train, test = run.prepare(DataLoader(seen, args.batch, shuffle=True), DataLoader(unseen, 256))

for epoch in run.epochs(args.epochs):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    scheduler.step()
    found = run.evaluate(model, test, count_right)
    run.print(f"epoch {epoch}: {found['accuracy']:.2%} of the unseen images are read right")
run.print(f"saved {run.save('images')}")
