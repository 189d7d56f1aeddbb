"""run.save of a model that lies in pieces: one plain file, filled by all ranks, whole or not at all, from no one's memory."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from echelon.comm.alone import AloneGroup
from echelon.comm.threads import Room
from echelon.errors import PeerLost, UsageError
from echelon.parallel.exchange import Exchange
from echelon.prepare import partial, save, stream
from echelon.prepare.partial import Partial
from tests.checkpoint_ranks import bits, together
from tests.layouts import along, grid, here, packed, staged, stretches
from tests.runs import State, averages, lay, run_of_one, runs_among_threads

ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    """Tied weights, several types, a buffer, a number, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 8)
        self.qkv = nn.Linear(8, 12, dtype=torch.float64)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.low = nn.Parameter(torch.randn(6, 10).to(torch.bfloat16))
        self.wave = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.tensor([True, False, True]))


WHOLE = Net()
NAMES = [name for name, _ in WHOLE.named_parameters()]


def by_rows(name, shape, size):
    return along(shape, size, 0) if shape and shape[0] else None


def by_columns(name, shape, size):
    return along(shape, size, 1) if len(shape) == 2 and shape[0] else None


def by_heads(name, shape, size):
    return (
        packed(shape, size)
        if name == "qkv.weight"
        else by_columns(name, shape, size)
        if name == "low"
        else None
    )


def by_stage(name, shape, size):
    return staged(shape, size, NAMES.index(name) * size // len(NAMES)) if name != "none" else None


LAYOUTS = {
    "rows": (3, by_rows),
    "columns": (3, by_columns),
    "columns, copies": (4, lambda n, s, size: along(s, size, 1, 2) if len(s) == 2 and s[0] else None),
    "heads": (2, by_heads),
    "stages": (3, by_stage),
    "stretches": (5, lambda n, s, size: stretches(s, size) if s != (0, 3) else None),
    "grid": (6, lambda n, s, size: grid(s, 2, 3) if len(s) == 2 and s[0] else None),
}


def split(layout, rank, turned=False):
    """The model as it lies on a rank, and what is where."""
    size, make = LAYOUTS[layout]
    net, placed = copy.deepcopy(WHOLE), {}
    for name, param in net.named_parameters():
        lies = make(name, tuple(param.shape), size)
        if lies is None:
            continue
        placed[id(param)] = lies[rank]
        if lies[rank].runs:
            mine = here(param.detach(), lies[rank])
            param.data = torch.stack([mine, mine], 1)[:, 0] if turned else mine
        else:
            param.data = torch.zeros((), dtype=param.dtype).expand(param.shape)
    return net, placed


def lost(outcome):
    raise PeerLost(outcome.reason, peers=outcome.peers)


def save_together(layout, path, **options):
    size, _ = LAYOUTS[layout]
    groups = Room(size).groups()

    def act(rank):
        net, placed = split(layout, rank, **options)
        found = stream.entries(net, rank, placed, {}, {})
        save.write_once(found, path, Exchange(groups[rank], lost), split=True)

    together(size, act)


def same(path):
    """The file is what the library would have written of the whole model, entry by entry."""
    found = safetensors.torch.load_file(path)
    right = WHOLE.state_dict()
    assert set(found) == set(right)
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor), name


def left(path):
    return [p.name for p in path.parent.iterdir() if p.name.endswith(".partial")]


@pytest.mark.case("run.save without the model in one memory")
@pytest.mark.parametrize("blocks", [stream.BLOCK_BYTES, 48])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_one_host_fill_one_file(tmp_path, layout, blocks, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", blocks)
    path = tmp_path / "model.safetensors"
    save_together(layout, path)
    same(path)
    save_together(layout, path, turned=True)
    same(path)
    assert left(path) == []
    reference = tmp_path / "library.safetensors"
    safetensors.torch.save_file({k: v.clone() for k, v in WHOLE.state_dict().items()}, reference)
    with safe_open(path, "pt") as mine, safe_open(reference, "pt") as other:
        assert set(mine.keys()) == set(other.keys())
        assert mine.metadata() == {"format": "pt"}


@pytest.mark.parametrize("far", [{1, 2}, {2}, {0}])
@pytest.mark.parametrize("layout", ["columns", "stages", "rows"])
def test_ranks_that_do_not_see_the_file_send_their_blocks(tmp_path, layout, far, monkeypatch):
    """Some on the host of rank 0, some not; blocks that end within a run."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 40)
    find, hosts = Partial.find.__func__, iter(range(100))
    monkeypatch.setattr(
        Partial,
        "find",
        classmethod(lambda cls, word: None if next(hosts) + 1 in far or far == {1, 2} else find(cls, word)),
    )
    path = tmp_path / "model.safetensors"
    save_together(layout, path)
    same(path)
    assert left(path) == []


def test_short_runs_are_written_right_without_reserved_space(tmp_path, monkeypatch):
    def refuse(fd, at, length):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(Partial, "_scatter", lambda self, block: pytest.fail("a page might not be there"))
    save_together("columns", tmp_path / "model.safetensors")
    same(tmp_path / "model.safetensors")


def test_short_runs_through_windows_smaller_than_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(partial, "WINDOW_BYTES", 1)
    save_together("columns", tmp_path / "model.safetensors")
    same(tmp_path / "model.safetensors")


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("where", ["make", "put", "replace"])
def test_a_full_disk_fails_on_all_ranks_and_keeps_the_old_file(tmp_path, where, far, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if far:
        monkeypatch.setattr(Partial, "find", classmethod(lambda cls, word: None))
    if where == "make":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(Partial, where, full)
    size, _ = LAYOUTS["columns"]
    groups = Room(size).groups()
    said = []

    def act(rank):
        net, placed = split("columns", rank)
        found = stream.entries(net, rank, placed, {}, {})
        try:
            save.write_once(found, path, Exchange(groups[rank], lost), split=True)
        except UsageError as error:
            said.append(str(error))

    together(size, act)
    assert len(said) == size
    assert all("the disk is full" in text and "Nothing was replaced" in text for text in said)
    assert path.read_bytes() == b"old"
    assert left(path) == []


def test_a_rank_with_another_model_is_told_so(tmp_path):
    groups = Room(2).groups()

    def act(rank):
        net = nn.Linear(3, 2 + rank)
        found = stream.entries(net, rank, {}, {}, {})
        with pytest.raises(UsageError, match="rank 1 has other tensors to save than rank 0"):
            save.write_once(found, tmp_path / "m.safetensors", Exchange(groups[rank], lost), split=True)

    together(2, act)
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_lost_meanwhile_ends_it_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    groups = Room(3).groups()

    def act(rank):
        if rank == 2:
            groups[2].abort("gone")
            return
        net, placed = split("columns", rank)
        with pytest.raises(PeerLost):
            save.write_once(
                stream.entries(net, rank, placed, {}, {}), path, Exchange(groups[rank], lost), split=True
            )

    together(3, act)
    assert path.read_bytes() == b"old"
    assert left(path) == []


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
from echelon.prepare import save, stream
from echelon.prepare.partial import Partial

stream.BLOCK_BYTES, put, count = 1000, Partial.put, 0

def dies(self, block):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, block)

Partial.put = dies
save.write(stream.entries(nn.Linear(50, 50), 0, {}, {}, {}), Path(sys.argv[1]))
"""


def test_a_kill_in_the_middle_keeps_the_old_file_and_the_next_save_tidies_up(tmp_path):
    path = tmp_path / "model.safetensors"
    save_together("rows", path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    same(path)
    assert len(left(path)) == 1
    with open(next(tmp_path.glob(".*.partial")), "rb") as file:
        assert len(file.read()) > 10_000, "its space was reserved"
    other = tmp_path / ".model.safetensors.x.partial"
    other.touch()
    save_together("columns", path)
    same(path)
    assert left(path) == []


MEASURED = """
import sys, torch
from pathlib import Path
from torch import nn
from echelon.comm.alone import AloneGroup
from echelon.mesh.layout import Placed, Runs
from echelon.parallel.exchange import Exchange
from echelon.prepare import save, stream

def status(name):
    return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) << 10

path = Path(sys.argv[1])
exchange = Exchange(AloneGroup(torch.device("cpu")), lambda lost: None)
save.write_once(stream.entries(nn.Linear(300, 300), 0, {}, {}, {}), path, exchange, False)
for rows, columns in ((4096, 4096), (4096, 2048), (65536, 128)):
    part = nn.Module()
    part.w = nn.Parameter(torch.ones(rows, columns))
    split = columns < 4096
    lies = Placed((rows, 2 * columns), (Runs(columns, columns, 2 * columns, rows),), (0,))
    found = stream.entries(part, 0, {id(part.w): lies} if split else {}, {}, {})
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = status("VmRSS")
    save.write_once(found, path.with_name(f"{columns}.safetensors"), exchange, split)
    print(status("VmHWM") - before)
"""


@pytest.mark.case("run.save without the model in one memory")
def test_saving_takes_little_memory_beside_what_a_rank_holds(tmp_path):
    """A whole model, a half of each row in long runs, and in short ones; 32 to 64 MiB each."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "m.safetensors")],
        cwd=ROOT, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    beside = [int(line) >> 20 for line in done.stdout.split()]
    assert len(beside) == 3
    assert max(beside) <= 24, f"{beside} MiB"


def test_a_pickle_of_a_split_model_is_refused_with_the_name_that_works(tmp_path):
    net, placed = split("rows", 0)
    exchange = Exchange(AloneGroup(torch.device("cpu")), lost)
    with pytest.raises(UsageError, match="split over ranks") as caught:
        save.write_once(stream.entries(net, 0, placed, {}, {}), tmp_path / "m.pt", exchange, split=True)
    assert "m.safetensors" in caught.value.remedy
    save.write_once(stream.entries(Net(), 0, {}, {}, {}), tmp_path / "m.pt", exchange, split=False)
    assert set(torch.load(tmp_path / "m.pt", weights_only=True)) == set(Net().state_dict())


def test_a_type_that_safetensors_lacks_is_named(tmp_path):
    net = nn.Module()
    net.wide = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    exchange = Exchange(AloneGroup(torch.device("cpu")), lost)
    with pytest.raises(UsageError, match=r"wide has the type torch\.complex128"):
        save.write_once(stream.entries(net, 0, {}, {}, {}), tmp_path / "m.safetensors", exchange, split=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_saves_what_forms_placed_and_the_averages_of_it(tmp_path):
    run = run_of_one(tmp_path / "it", ema=0.5)
    net = run.prepare(Net())
    whole = {
        name: torch.randn(p.shape).to(p.dtype) for name, p in net.named_parameters() if p.is_floating_point()
    }
    names = {id(p): name for name, p in net.named_parameters()}
    lay(run, net, "qkv.weight", along(tuple(net.qkv.weight.shape), 1, 1)[0])
    for param, average in averages(run, net):
        average.copy_(whole[names[id(param)]])
    found = safetensors.torch.load_file(run.save(tmp_path / "m"))
    assert torch.equal(found["head.weight"], whole["embed.weight"])
    assert torch.equal(found["qkv.weight"], whole["qkv.weight"])
    assert torch.equal(found["seen"], net.seen)
    assert torch.equal(found["wave"], net.wave)


def test_stages_save_their_own_buffers_also_when_a_module_replaced_one(tmp_path):
    """Two stages, as a pipeline leaves them: each rank's other stage is a placeholder."""
    whole = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(4)).state_dict()
    whole |= {"0.running_mean": torch.tensor([1.0, 2, 3]), "1.running_mean": torch.tensor([4.0, 5, 6, 7])}

    def act(run):
        net = run.prepare(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(4)))
        net.load_state_dict(whole)
        for stage, module in enumerate(net):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                shape = tuple(tensor.shape)
                lay(run, net, f"{stage}.{name}", staged(shape, 2, stage)[run.rank])
                if stage != run.rank:
                    tensor.data = torch.full((), 99, dtype=tensor.dtype).expand(shape)
        assert len(State(run).holdings()) == 5
        net[run.rank].running_mean = net[run.rank].running_mean + 1
        run.save(tmp_path / "m", net)

    runs_among_threads(2, act)
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert found["0.running_mean"].tolist() == [2, 3, 4]
    assert found["1.running_mean"].tolist() == [5, 6, 7, 8]
    assert found["1.weight"].tolist() == [1, 1, 1, 1]
    assert found["1.num_batches_tracked"] == 0


def test_a_file_of_the_same_name_on_another_disk_is_not_taken_for_it(tmp_path):
    made, word = Partial.make(tmp_path / "m.safetensors", 100)
    with contextlib.ExitStack() as stack:
        stack.callback(made.discard)
        found = Partial.find(word)
        assert found is not None
        found.close()
        assert Partial.find({**word, "host": "another"}) is None
        assert Partial.find({**word, "nonce": "00" * 16}) is None
        assert Partial.find({**word, "id": [1, 2]}) is None
        assert Partial.find({**word, "path": str(tmp_path / "nothing")}) is None
