"""Workers that may use so much memory and no more: a control group for each, and a script that trains a model of a known size.

with caps(workers=2, nbytes=640 << 20) as groups:
    result = echelon_run(SCRIPT, *groups.args(layers=48), workers=2, options=("--strategy", "sharded"))
assert groups.peak(0) < …
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from echelon.mesh import memory
from echelon.mesh.memory import Training
from echelon.strategy import merge, parse
from tests import needs

MIB = 1 << 20
NUMBERS = itertools.count()
LAYER_BYTES = 4 * 1024 * 1025
"""Parameters of one layer of the script's model, in float32."""

SCRIPT = """
import os, sys
from pathlib import Path

(Path(f"{sys.argv[1]}-{os.environ['RANK']}") / "cgroup.procs").write_text(str(os.getpid()))  # before torch is loaded

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon

layers, steps = int(sys.argv[2]), int(sys.argv[3])
run = echelon.init()
small = nn.Linear(8, 8)  # so that torch has loaded what a first step needs
small_optimizer = torch.optim.AdamW(small.parameters())
nn.functional.mse_loss(small(torch.ones(8, 8)), torch.zeros(8, 8)).backward()
small_optimizer.step()
usage = [Path(f"{sys.argv[1]}-{run.rank}") / name for name in ("memory.usage_in_bytes", "memory.current")]
run.print("base", next(file for file in usage if file.exists()).read_text())
with run.build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(0)
x = torch.randn(8 * steps, 1024, generator=g)
loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for batch in loader:
    loss = run.step(nn.functional.mse_loss, batch)
run.print(f"loss {loss.item():.9f}")
"""


def predicted(strategy: str, workers: int, layers: int, base: int) -> int:
    """The peak of a worker of SCRIPT, with AdamW, of which `base` bytes are Python's and torch's."""
    whole = layers * LAYER_BYTES
    found = Training(
        parameters=whole, gradients=whole, state=2 * whole, largest=LAYER_BYTES, unit=LAYER_BYTES
    )
    need = memory.needed(found, memory.split_of(merge(parse(strategy)), workers))
    return memory.peak(need, base, activations=(layers + 1) * 8 * 1024 * 4)


class Caps:
    """The control groups of a run's workers."""

    def __init__(self, stem: Path, workers: int, v2: bool) -> None:
        self.stem, self.folders, self.v2 = stem, [Path(f"{stem}-{rank}") for rank in range(workers)], v2

    def args(self, layers: int, steps: int = 3) -> tuple[str, ...]:
        """The arguments of SCRIPT."""
        return str(self.stem), str(layers), str(steps)

    def peak(self, rank: int) -> int:
        """The most bytes that this worker had at once."""
        return int(
            (self.folders[rank] / ("memory.peak" if self.v2 else "memory.max_usage_in_bytes")).read_text()
        )


@contextlib.contextmanager
def caps(workers: int, nbytes: int) -> Iterator[Caps]:
    """A control group for each worker, removed afterwards."""
    needs.use("memory")
    found = needs.memory_groups()
    assert found, "no memory group can be written"
    root, limit = found
    made = Caps(root / f"echelon-cap-{os.getpid()}-{next(NUMBERS)}", workers, v2=limit == "memory.max")
    try:
        for folder in made.folders:
            folder.mkdir()
            (folder / limit).write_text(str(nbytes))
        yield made
    finally:
        _remove(made)


def _remove(made: Caps) -> None:
    for folder in made.folders:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                signal.sigtimedwait([], 0.05)
