"""A bank, a shop and a phone company know different things of the same customers. They train one model, and nobody sends a column.

python vertical.py                                            one process reads all three files
echelon run --workers 3 --strategy tensor=3 vertical.py       each worker reads one of them; the bank owns the labels
"""

import argparse
import csv
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import echelon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)

FILES = {
    "bank": ["income", "savings", "debts", "age", "cards"],
    "shop": ["orders", "returned", "last_visit"],
    "phone": ["calls", "abroad", "data", "years"],
}
COLUMNS = [name for names in FILES.values() for name in names]


def write_files():
    """The world's part: 2,000 customers, in each file in another order. Who pays back follows from all three, and the bank saw it."""
    draw = random.Random(0)
    customers = [{name: draw.gauss(0, 1) for name in COLUMNS} | {"id": i} for i in range(2000)]
    for c in customers:
        signal = c["income"] - c["debts"] * c["orders"] + 2 * c["returned"] * c["abroad"] + c["years"]
        c["paid"] = float(signal + draw.gauss(0, 0.5) > 0)
    for company, names in FILES.items():
        draw.shuffle(customers)
        with open(f"vertical-{company}.csv", "w", newline="") as file:
            fields = ["id", *names, *(["paid"] if company == "bank" else [])]
            csv.writer(file).writerows([fields, *([c[field] for field in fields] for c in customers)])


def read(companies):
    """What is in the files of these companies, as Columns of the whole table."""
    rows = {}
    for company in companies:
        with open(f"vertical-{company}.csv", newline="") as file:
            for row in csv.DictReader(file):
                rows.setdefault(int(row["id"]), {}).update(row)
    names = [name for company in companies for name in FILES[company]]
    values = torch.tensor([[float(row[name]) for name in names] for row in rows.values()])
    paid = torch.tensor([float(row["paid"]) for row in rows.values()]) if "bank" in companies else None
    return echelon.Columns(values, names, COLUMNS, target=paid, ids=list(rows))


def hits(model, batch):
    x, y = batch
    return {"right": (((model(x)[:, 0] > 0) == (y > 0)).sum(), len(x))}


run = echelon.init()
with run.phase("write the files"):
    write_files()
table = read(list(FILES)[run.rank :: run.world_size])
known, unseen = Subset(table, range(1500)), Subset(table, range(1500, 2000))
model = nn.Sequential(nn.Linear(len(COLUMNS), 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(known, 64, shuffle=True))
for epoch in run.epochs(args.epochs):
    for x, y in loader:
        loss = run.step(lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y), (x, y))
        run.log(loss=loss)
    right = run.evaluate(model, DataLoader(unseen, 250), hits)["right"]
    run.print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} of the unseen customers right")
run.save("vertical")
