"""State that lies in pieces: saved under any layout, read under any other, bit for bit; written by all alike; distrusted when read."""

from __future__ import annotations

import json
import math
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.checkpoint import holding, manifest
from echelon.checkpoint.holding import Holding, share
from echelon.checkpoint.load import latest, open_saved
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Placed, Runs
from tests.checkpoint_ranks import bits, read, save
from tests.layouts import along, grid, here, names, packed, staged, stretches, whole

LAYOUTS = names()
SHAPE = (12, 10)


def held(tensor, layout):
    """What each rank holds of the tensor `w`, flat or turned: its elements count in their own order."""

    def of(rank):
        placed = layout[rank]
        mine = here(tensor, placed)
        return [Holding(Key("w"), mine, placed, placed.copies)] if placed.runs else []

    return of


def loads(saved, tensor, layout):
    for placed in layout:
        wide = torch.zeros(2 * placed.numel, dtype=tensor.dtype)
        for out in (torch.zeros(placed.numel, dtype=tensor.dtype), wide[::2]):  # the second not contiguous
            saved.read(Key("w"), out, placed)
            assert bits(torch.cat([out])) == bits(here(tensor, placed))


@pytest.mark.case("saved in pieces, read in any others")
@pytest.mark.parametrize("one", LAYOUTS)
def test_saved_under_one_layout_and_read_under_every_other(tmp_path, one):
    tensor = torch.randn(SHAPE)
    make, size = LAYOUTS[one]
    save(tmp_path, 1, held(tensor, make(SHAPE)), size=size)[0].wait()
    saved, _ = latest(tmp_path)
    assert bits(read(saved, "w")) == bits(tensor)
    for other, _ in LAYOUTS.values():
        loads(saved, tensor, other(SHAPE))


@pytest.mark.case("saved in pieces, read in any others")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_any_layout_any_type(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]))
    tensor = (torch.randn(shape) * 3).to(dtype)

    def layout():
        kind = data.draw(st.sampled_from(["whole", "stretches", "along", "packed", "stage", "grid"]))
        size = data.draw(st.integers(1, 5))
        if kind == "along":
            copies = data.draw(st.integers(1, 2))
            return along(shape, size * copies, data.draw(st.integers(0, len(shape) - 1)), copies)
        if kind == "grid" and len(shape) == 2:
            return grid(shape, size, data.draw(st.integers(1, 3)))
        if kind == "packed" and shape[0] % 3 == 0:
            return packed(shape, size)
        if kind == "stage":
            return staged(shape, size, data.draw(st.integers(0, size - 1)))
        return whole(shape, size) if kind == "whole" else stretches(shape, size)

    saved_as = layout()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 1, held(tensor, saved_as), size=len(saved_as))[0].wait()
        saved, _ = latest(folder)
        loads(saved, tensor, layout())
        assert bits(read(saved, "w")) == bits(tensor)


def test_a_matrix_split_by_columns_is_read_across_blocks(tmp_path, monkeypatch):
    """Blocks that end within a row, of what was saved and of what is read."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)
    monkeypatch.setattr("echelon.checkpoint.load.BLOCK_BYTES", 1000)
    monkeypatch.setattr("echelon.checkpoint.snapshot.BLOCK_BYTES", 1000)
    monkeypatch.setattr(holding, "CUT_BYTES", 100)
    tensor = torch.randn(103, 97)
    layout = along((103, 97), 6, 1, 2)
    save(tmp_path, 1, held(tensor, layout), size=6)[0].wait()
    saved, _ = latest(tmp_path)
    for other in (layout, along((103, 97), 4, 0), along((103, 97), 5, 1), stretches((103, 97), 7)):
        loads(saved, tensor, other)
    rows = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["tensors"][0]["pieces"]
    assert all(len(piece["crc32"]) > 1 for piece in rows if piece.get("count", 1) > 40)


def test_copies_of_columns_are_written_by_all_that_hold_them_alike_much():
    shape = (1000, 6000)
    for layout in (along(shape, 6, 1, 3), packed((3000, 2000), 4), whole(shape, 5)):
        holdings = [Holding(Key("w"), torch.empty(1).expand(p.numel), p, p.copies) for p in layout]
        written = [
            sum(part.num_bytes for part in share([holdings[rank]], rank)) for rank in range(len(layout))
        ]
        assert sum(written) == 4 * math.prod(layout[0].shape)
        assert max(written) - min(written) <= 8
        parts = [part for rank, h in enumerate(holdings) for part in share([h], rank)]
        assert all(part.stop - part.start == part.run.numel for part in parts)


def test_a_placeholder_holds_nothing_and_reads_nothing(tmp_path):
    layout = staged((4, 3), 2, 1)
    nothing = Holding(Key("w"), torch.empty(0), layout[0], (0,))
    tensor = torch.randn(4, 3)
    save(tmp_path, 1, lambda r: [nothing] if r == 0 else held(tensor, layout)(1), size=2)[0].wait()
    saved, _ = latest(tmp_path)
    assert torch.equal(read(saved, "w"), tensor)
    saved.read(Key("w"), torch.empty(0), layout[0])


def test_checkpoints_of_whole_tensors_are_as_they_were(tmp_path):
    """Older versions read them: format 1, pieces without period and count, also where ranks cut a tensor."""
    tensor = torch.randn(3, 400_000)
    save(tmp_path, 1, held(tensor, whole((3, 400_000), 2)), size=2)[0].wait()
    plain = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert plain["format"] == 1
    for piece in plain["tensors"][0]["pieces"]:
        assert set(piece) == {"file", "entry", "start", "stop", "crc32"}
    save(tmp_path, 2, held(tensor, along((3, 400_000), 2, 1)), size=2)[0].wait()
    plain = json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())
    assert plain["format"] == 2
    assert [(p["start"], p["stop"], p["period"], p["count"]) for p in plain["tensors"][0]["pieces"]] == [
        (0, 200_000, 400_000, 3), (200_000, 400_000, 400_000, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "placed",
    [
        Placed((4, 3), (Runs(0, 13),), (0,)),
        Placed((4, 3), (Runs(0, 2, 3, 5),), (0,)),
        Placed((4, 3), (Runs(0, 4, 3, 2),), (0,)),
        Placed((4, 3), (Runs(-1, 3),), (0,)),
        Placed((4, 3), (Runs(0, 3, 0, 0),), (0,)),
    ],
)
def test_what_is_said_to_lie_outside_of_its_tensor_is_refused(tmp_path, placed):
    tensor = torch.zeros(max(placed.numel, 0))
    with pytest.raises(CheckpointError, match=r"are held as .* of shape \(4, 3\)"):
        save(tmp_path, 1, lambda r: [Holding(Key("w"), tensor, placed, (0,))])
    save(tmp_path, 1, lambda r: [Holding(Key("w"), torch.zeros(4, 3), whole((4, 3), 1)[0], (0,))])[0].wait()
    with pytest.raises(CheckpointError, match="cannot take"):
        latest(tmp_path)[0].read(Key("w"), tensor, placed)


@pytest.fixture
def folder(tmp_path):
    """`w` (12, 10) in three columns."""
    save(tmp_path, 20, held(torch.randn(SHAPE), along(SHAPE, 3, 1)), size=3)[0].wait()
    return tmp_path / "step-00000020"


def edit(folder, change):
    path = folder / manifest.NAME
    plain = json.loads(path.read_text())
    change(plain["tensors"][0]["pieces"])
    plain.pop("crc32", None)
    text = json.dumps(plain)[:-1].encode()
    path.write_bytes(text + b',\n "crc32": %d\n}\n' % zlib.crc32(text))


@pytest.mark.case("damaged checkpoints are named")
@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: pieces[0].update(count=11),
        lambda pieces: pieces[0].update(count=10**12),
        lambda pieces: pieces[0].update(count=-1),
        lambda pieces: pieces[0].update(count=0),
        lambda pieces: pieces[0].update(count=1.5),
        lambda pieces: pieces[0].update(period=9),
        lambda pieces: pieces[0].update(period=0),
        lambda pieces: pieces[0].update(period="10"),
        lambda pieces: pieces[0].update(start=1, stop=4),
        lambda pieces: pieces[0].update(start=2),
        lambda pieces: pieces[0].pop("count"),
        lambda pieces: pieces.pop(),
        lambda pieces: pieces.append(pieces[0]),
    ],
)
def test_a_manifest_whose_runs_lie_is_refused_before_anything_is_read(folder, change):
    open_saved(folder)
    edit(folder, change)
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        open_saved(folder)
    assert time.monotonic() - began < 1


def test_swapped_pieces_are_caught_by_what_their_files_hold(folder):
    """Runs that cover the tensor, of files that hold others: the size or the checksum says so."""

    def change(pieces):
        pieces[0]["entry"], pieces[2]["entry"] = pieces[2]["entry"], pieces[0]["entry"]
        pieces[0]["file"], pieces[2]["file"] = pieces[2]["file"], pieces[0]["file"]

    edit(folder, change)
    with pytest.raises(CheckpointError, match=r"damaged|cannot be used"):
        read(open_saved(folder), "w")


def test_the_lines_of_the_documentation_read_columns_too(tmp_path):
    tensor = torch.randn(SHAPE)
    save(tmp_path, 20, held(tensor, along(SHAPE, 3, 1)), size=3)[0].wait()
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(program.replace("runs/latest/checkpoints", str(tmp_path)), found)
    assert torch.equal(found["state"]["w"], tensor)
