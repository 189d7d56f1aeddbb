"""The price of a house from its bedrooms and bathrooms, with the computational graph drawn step by step.

python house_prices.py                                    one process: a step after every house
python house_prices.py --accumulate 2                     gradients of two houses add up, then one step
echelon run --workers 2 house_prices.py --batch 2         two workers, a house each: gradients are of both
"""

import argparse

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import echelon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch", type=int, default=1, help="houses in a forward pass, over all workers")
parser.add_argument("--accumulate", type=int, default=1, help="backward passes for each step (default: 1)")
parser.add_argument("--draw", type=int, default=2, help="forward passes to draw (default: 2)")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def houses(n=40):
    """The two houses of the drawing, then some from a seeded generator: price is about 2 x1 + 1.5 x2."""
    g = torch.Generator().manual_seed(1)
    x = torch.stack(
        [torch.randint(1, 8, (n,), generator=g), torch.randint(1, 4, (n,), generator=g)], 1
    ).double()
    y = (x @ torch.tensor([2.0, 1.5]).double() + torch.randn(n, generator=g)).round()
    x[:2], y[:2] = torch.tensor([[6.0, 2.0], [5.0, 2.0]]), torch.tensor([15.0, 12.0])
    return TensorDataset(x, y)


def draw(title):
    """loss = (x1 w1 + x2 w2 + b - y)², averaged over the batch. All workers call this, one prints."""
    many = lambda values, form: " ".join(format(v, form) for v in values.tolist())  # noqa: E731
    x1, x2 = (many(column, "g") for column in run.gather(x).T)  # gather and reduce: of all workers
    right = [f"y_pred {many(run.gather(y_pred), '.2f')}", f"y {many(run.gather(y), 'g')}"]
    end = f"loss {run.reduce(loss).item():.2f}"
    w1, w2, b = (f"{v:7.4f}" for p in model.parameters() for v in p.flatten().tolist())
    grads = [v for p in model.parameters() if p.grad is not None for v in p.grad.flatten().tolist()]
    g1, g2, gb = (f"{v:8.2f}" for v in grads) if grads else ["    none"] * 3
    run.print(f"\n{number}: {title}")
    run.print(f"  x1 {x1} ─×─ w1 {w1} grad {g1} ─┐")
    run.print(f"  x2 {x2} ─×─ w2 {w2} grad {g2} ─┼─ {right[0]} ─┐")
    run.print(f"     {'':{len(x1)}}     b  {b} grad {gb} ─┘  {right[1]:>{len(right[0])}} ─┴─ {end}")


run = echelon.init()
model = torch.nn.Linear(2, 1).double()
with torch.no_grad():
    model.weight.copy_(torch.tensor([[0.5, 0.25]]))
    model.bias.fill_(0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(houses(), batch_size=args.batch))

number = 0
for _ in run.epochs(args.epochs):
    for x, y in loader:
        number += 1
        show = draw if number <= args.draw else lambda title: None
        y_pred = model(x)[:, 0]
        loss = mse_loss(y_pred, y)
        show("forward")
        loss.backward()
        show("loss.backward")
        if number % args.accumulate == 0:
            optimizer.step()
            show("optimizer.step")
            optimizer.zero_grad()
            show("optimizer.zero_grad")
        run.log(loss=loss)
w1, w2, b = [*model.weight[0].tolist(), model.bias.item()]
run.print(f"\nafter {run.global_step} steps: price = {w1:.4f} x1 + {w2:.4f} x2 + {b:.4f}")
run.save("house_prices")
