"""Bytes of parameters, gradients and optimizer state that a rank holds after a step, under data parallel and under each level. Writes them.

Counted are the storages of all tensors that are alive, less those that were alive before the model was made.
"""

import gc
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.parallel.local import is_split, local
from echelon.parallel.sharded.split import Retired
from echelon.strategy import Strategy
from tests.runs import expected_bytes, num_placed, run_beside, sent_bytes

WIDTH, DEPTH = 256, 8


def alive():
    gc.collect()
    found = {}
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor) and type(obj) is not Retired:
            for t in (obj, obj.grad if obj.is_leaf and obj.requires_grad else None):
                if t is not None and (not is_split(t) or t.device.type == "cpu"):
                    storage = local(t).untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return found


def held(first, strategy):
    before = set(alive())
    run = run_beside(first, strategy)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    whole = sum(p.nbytes for p in model.parameters())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(TensorDataset(torch.randn(16, WIDTH), torch.randn(16, 1)), batch_size=8)
    model, opt, loader = run.prepare(model, opt, loader)
    sizes = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        sizes.append(sum(size for i, size in alive().items() if i not in before))
        opt.zero_grad()
        del loss, x, y
    placed, owner = num_placed(run)
    return {
        "sent": sent_bytes(run) / len(sizes),
        "predicted": expected_bytes(run),
        "held": max(sizes),
        "whole": whole,
        "placed": placed,
        "owner": owner,
    }


def main():
    torch.set_num_threads(1)
    first = echelon.init()
    forms = {0: Strategy()} | {n: Strategy(form="sharded", level=n, wrap_mib=0.25) for n in (1, 2, 3)}
    said = {level: held(first, strategy) for level, strategy in forms.items()}
    torch.save(said, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
