"""A generator learns to place points on a ring of eight gaussians; a critic learns to tell them from real ones.

Two models and two optimizers in one loop. Noise is drawn where a sample is read, so it belongs to the sample and is
the same at any number of workers.

python gan.py
echelon run --workers 2 gan.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import echelon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=128, help="points a step, over all workers")
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)
NOISE = 4  # numbers a point


class Points(Dataset):
    """Real points, each with fresh noise in every epoch."""

    def __init__(self, n=6400):
        g = torch.Generator().manual_seed(0)
        angle = torch.randint(0, 8, (n,), generator=g) * (math.pi / 4)
        self.points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i], torch.randn(NOISE)


def net(n_in, n_out, width=64):
    first, second, last = nn.Linear(n_in, width), nn.Linear(width, width), nn.Linear(width, n_out)
    return nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), last)


def draw(points, size=15):
    """Where points lie in the square from -1.5 to 1.5, as text."""
    x, y = ((points + 1.5) / 3 * size).long().clamp(0, size - 1).T
    count = torch.bincount(y * size + x, minlength=size * size).view(size, size).flip(0)
    return "\n".join("".join(2 * " .:*#"[min(4, n)] for n in row) for row in count.tolist())


run = echelon.init()
generator, critic = net(NOISE, 2), net(2, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
generator, critic, opt_g, opt_c = run.prepare(generator, critic, opt_g, opt_c)
loader = run.prepare(DataLoader(Points(), batch_size=args.batch, shuffle=True))

for _ in run.epochs(args.epochs):
    for real, noise in loader:
        fake = generator(noise)
        loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_g = F.softplus(-critic(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        run.log(loss=loss_g, critic=loss_c)
noise = torch.randn(400, NOISE, generator=torch.Generator().manual_seed(9))
points = generator(noise.to(run.device)).detach().cpu()
run.print(draw(points))
run.print(f"mean distance from the centre {points.norm(dim=1).mean():.4f} after {run.global_step} steps")
run.save("gan", generator)
