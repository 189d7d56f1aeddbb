"""Checkpoints of state on a GPU, run by hand: python tests/gpu/checkpoint_check.py [GIGABYTES]

The copy must hold the values of the moment of save(), although the stream changes them right after before_change(); and the
host must not be blocked by it.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import open_saved
from echelon.checkpoint.meeting import alone
from echelon.checkpoint.saver import Saver
from echelon.clock import Deadline
from echelon.mesh.layout import Key, Span

gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
rows = int(gigabytes * 1e9 / 4 / 1000 / 25)
state = {f"layer.{i}": torch.zeros(rows, 1000, device="cuda") for i in range(24)}
state |= {"turned": torch.zeros(1000, rows, device="cuda").t(), "half": torch.zeros(100, device="cuda").bfloat16(),
          "host": torch.zeros(1000), "complex": torch.zeros(10, device="cuda", dtype=torch.complex64)}  # fmt: skip
held = [Holding(Key(n), t, Span.whole(tuple(t.shape)), (0,)) for n, t in state.items()]
loose = torch.zeros(1000, device="cuda")
held.append(Holding(Key("loose"), loose, Span.whole((1000,)), (0,), settled=False))
work = torch.randn(8192, 8192, device="cuda")

with tempfile.TemporaryDirectory() as folder:
    saver = Saver(folder, 0, 1, alone(), print)
    saver.reserve(held)
    for step in range(1, 6):
        for tensor in (*state.values(), loose):
            tensor.fill_(step)  # still on the stream when save() is called
        before = saver.stall_s
        handle = saver.save(step, held, {"step": step}, {})
        loose.fill_(-1)
        for _ in range(20):  # forward and backward
            work @ work
        saver.before_change()
        for tensor in state.values():
            tensor.fill_(-1)
        blocked = saver.stall_s - before
        torch.cuda.synchronize()
        saver.finish(Deadline.after(300))
        saved = open_saved(handle.wait().path)
        for name in (*state, "loose"):
            out = torch.empty(saved.shape(Key(name)), dtype=saved.dtype(Key(name)), device="cuda")
            saved.read(Key(name), out)
            assert (out == step).all(), (step, name)
        print(f"step {step}: right, host blocked {1e3 * blocked:.1f} ms, pinned {saver._buffer._pinned}")
    saver.close()
print("ok")
