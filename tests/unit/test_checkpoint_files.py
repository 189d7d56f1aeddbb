"""What is in a checkpoint's files: every type, every layout, and what a reader makes of damaged ones."""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from echelon.checkpoint import kinds, manifest, tensorfile
from echelon.checkpoint.holding import CUT_BYTES, Holding, deal
from echelon.checkpoint.load import latest, open_saved
from echelon.errors import CheckpointError
from echelon.mesh.layout import Key, Span
from tests.checkpoint_ranks import bits, read, save, save_alone, whole


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, NaNs with payloads included."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    if dtype is torch.complex32:
        return torch.view_as_complex(raw.view(torch.float16).view(*shape, 2))
    return raw.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", list(kinds.FILE_NAMES), ids=kinds.name_of)
def test_every_type_comes_back_bit_for_bit(tmp_path, dtype):
    state = {
        "plain": some(dtype, 3, 5),
        "scalar": some(dtype),
        "empty": some(dtype, 0, 2),
        "turned": some(dtype, 4, 6).t(),
    }
    save_alone(tmp_path, 1, state)
    saved, _ = latest(tmp_path)
    for name, tensor in state.items():
        assert saved.dtype(Key(name)) is dtype
        assert bits(read(saved, name)) == bits(tensor), name


@pytest.mark.case("checkpoint files are safetensors and JSON")
def test_the_library_reads_what_we_stream(tmp_path):
    state = {n: some(d, 7, 3) for d, n in kinds.FILE_NAMES.items() if not d.is_complex} | {
        "w": torch.randn(2, 3),
        "one": torch.tensor(1.5),
    }
    state |= {
        "z": torch.randn(2, 2, dtype=torch.complex64),
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    save_alone(tmp_path, 1, state, objects={"x": torch.arange(3), "z": torch.tensor([1j])})
    shard, tree = sorted(tmp_path.glob("*/*.safetensors"), reverse=True)
    with safe_open(shard, "pt") as file:
        assert set(file.keys()) == set(state)
        for name, tensor in state.items():
            found = file.get_tensor(name)
            assert bits(found) == bits(tensor)
            assert found.shape == (torch.Size([2, 2, 2]) if name == "z" else tensor.shape)
    with safe_open(tree, "pt") as file:
        assert file.get_tensor("0").tolist() == [0, 1, 2]
    header = shard.read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0, "tensors lie aligned"


def test_conjugates_negatives_and_views_are_saved_as_they_read(tmp_path):
    z = torch.randn(3, 4, dtype=torch.complex128)
    base = torch.randn(10, 10)
    state = {"conj": z.conj(), "neg": z.conj().imag, "slice": base[2:7:2, 1:9:3], "wide": base[:1].expand(5, 10),
             "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}  # fmt: skip
    save_alone(tmp_path, 1, state)
    saved, _ = latest(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(read(saved, name), tensor), name


def test_names_may_be_anything(tmp_path):
    names = ["a", "a#exp_avg", "__metadata__", "weißwurst/../x", "", "[0:3]"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    held = [*whole(state, 1), Holding(Key("a", "exp_avg"), torch.ones(2), Span.whole((2,)), (0,))]
    save(tmp_path, 1, lambda rank: held)[0].wait()
    saved, _ = latest(tmp_path)
    assert [read(saved, name)[0].item() for name in names] == [0, 1, 2, 3, 4, 5]
    assert read(saved, "a", "exp_avg").tolist() == [1, 1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * CUT_BYTES), st.sampled_from([1, 2, 4, 8, 16])), max_size=12),
    st.integers(1, 9),
)
def test_dealing_covers_everything_once_and_balances(sizes, ways):
    dealt = deal(sizes, ways)
    for index, (numel, _) in enumerate(sizes):
        pieces = sorted((start, stop) for way in dealt for i, start, stop in way if i == index)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert all(start < stop for start, stop in pieces) or numel == 0
    loads = [sum((stop - start) * sizes[i][1] for i, start, stop in way) for way in dealt]
    assert max(loads) <= sum(loads) / ways + CUT_BYTES


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_windows_are_the_flattened_elements_whatever_the_strides(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(math.prod(shape)).view([shape[i] for i in order])
    tensor = tensor.permute([order.index(i) for i in range(len(shape))]) if shape else tensor
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    found = list(kinds.windows(tensor, start, stop))
    flat = [x for _, view in found for x in view.reshape(-1).tolist()]
    assert flat == tensor.reshape(-1)[start:stop].tolist()
    at = start
    for where, view in found:
        assert where == at
        at += view.numel()


# what a reader says


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with one float tensor `w` (4, 3) and objects."""
    torch.manual_seed(0)
    save_alone(
        tmp_path,
        20,
        {"w": torch.randn(4, 3), "layers.0.bias": torch.zeros(2)},
        objects={"lr": 0.1, "t": torch.ones(3)},
    )
    return tmp_path / "step-00000020"


def edit(folder, change):
    path = folder / manifest.NAME
    plain = json.loads(path.read_text())
    change(plain)
    plain.pop("crc32", None)
    text = json.dumps(plain)[:-1].encode()
    path.write_bytes(text + b',\n "crc32": %d\n}\n' % zlib.crc32(text))


def shard(folder):
    return next(folder.glob("shard-*"))


def says(words, act, *args):
    with pytest.raises(CheckpointError) as caught:
        act(*args)
    assert words in str(caught.value), str(caught.value)
    assert caught.value.remedy or "cover" in words


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.case("damaged checkpoints are named")
def test_a_flipped_byte_is_found_and_the_tensor_named(folder):
    flip(shard(folder), -1)
    saved = open_saved(folder)
    says("the checksum of w (value) is wrong", read, saved, "w")
    assert read(saved, "layers.0.bias").tolist() == [0, 0]


def test_flipped_bytes_in_objects_are_found(folder):
    flip(next(folder.glob("objects-*.json")), 3)
    says("checksum", open_saved(folder).objects, 0)
    flip(next(folder.glob("objects-*.json")), 3)
    flip(next(folder.glob("objects-*.safetensors")), -1)
    says("checksum of tensor 0", open_saved(folder).objects, 0)


@pytest.mark.parametrize("keep", [0, 7, 8, 50, -1])
def test_a_truncated_file_is_said_to_be(folder, keep):
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:keep])
    says(f"{path.name} is truncated", open_saved, folder)
    saved, skipped = latest(folder.parent)
    assert saved is None
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000020 is damaged")


@pytest.mark.parametrize("at", [0, 7, 8, 20, 60])
def test_a_header_that_lies_is_refused(folder, at):
    path = shard(folder)
    raw = bytearray(path.read_bytes())
    raw[at] = 0xFF
    path.write_bytes(raw)
    says("damaged", lambda: [read(open_saved(folder), name) for name in ("w", "layers.0.bias")])


@pytest.mark.parametrize(
    "table",
    [{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}, {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
     {"w": {"dtype": "X", "shape": [4], "data_offsets": [0, 16]}}, {"w": {"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 16]}},
     {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, {"w": 3}, [1], {"w": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24, 3]}}],
)  # fmt: skip
def test_absurd_headers_are_refused(table):
    text = json.dumps(table).encode()
    says("damaged", tensorfile.read_header, text, 200, "x")


def test_a_missing_file_is_named(folder):
    shard(folder).unlink()
    says("is missing", open_saved, folder)


def test_a_wrong_shape_names_both(folder):
    saved = open_saved(folder)
    says("w (value) has shape (4, 3) in", saved.read, Key("w"), torch.empty(4, 4))
    says("(4, 4) here", saved.read, Key("w"), torch.empty(4, 4))
    says("(12) here", saved.read, Key("w"), torch.empty(3), Span((12,), 0, 3))
    with pytest.raises(CheckpointError, match=r"3 elements cannot take \[0, 4\)"):
        saved.read(Key("w"), torch.empty(3), Span((4, 3), 0, 4))


def test_a_wrong_type_names_both(folder):
    says("w (value) is float32 in", open_saved(folder).read, Key("w"), torch.empty(4, 3, dtype=torch.float64))


def test_a_missing_key_names_the_nearest(folder):
    saved = open_saved(folder)
    says("the nearest name is layers.0.bias", saved.shape, Key("layers.O.bias"))
    says("not its slot 'exp_avg'", saved.shape, Key("w", "exp_avg"))


def test_a_newer_format_says_so(folder):
    edit(folder, lambda plain: plain.update(format=3))
    says("has format 3", open_saved, folder)


def rename(plain, name):
    old = plain["tensors"][0]["pieces"][0]["file"]
    plain["files"][name] = plain["files"].pop(old)
    for row in plain["tensors"]:
        row["pieces"][0]["file"] = name


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a/b", ".hidden", "", "manifest.json", 3]
)
def test_a_manifest_that_points_elsewhere_is_refused(folder, name):
    edit(
        folder,
        lambda plain: (
            rename(plain, name)
            if isinstance(name, str)
            else plain["tensors"][0]["pieces"][0].update(file=name)
        ),
    )
    with pytest.raises(CheckpointError, match=r"not the name of a file|KeyError"):
        open_saved(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["tensors"][0].update(shape=[1 << 40, 1 << 40]),
        lambda p: p["tensors"][0].update(shape=[-1, 3]),
        lambda p: p["tensors"][0].update(dtype="object"),
        lambda p: p["tensors"][1]["pieces"][0].update(stop=10**15),
        lambda p: p["tensors"][1]["pieces"][0].update(start=1),
        lambda p: p["tensors"][1]["pieces"].clear(),
        lambda p: p["tensors"][1]["pieces"][0].update(crc32=[]),
        lambda p: p["tensors"].append(p["tensors"][0]),
        lambda p: p["objects"]["0"].update(file="x.json"),
        lambda p: p.update(step="20"),
        lambda p: p.update(block_bytes=1),
        lambda p: p.clear(),
        lambda p: p.pop("tensors"),
    ],
)
def test_absurd_manifests_are_refused(folder, change):
    edit(folder, change)
    with pytest.raises(CheckpointError):
        open_saved(folder)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=30), st.integers(0, 2000), st.integers(0, 30))
def test_a_manifest_of_any_bytes_is_read_or_refused(patch, at, cut):
    text = manifest.write(manifest.Manifest(1, 1, 0.0, {}, {}, {}, {"a.safetensors": 3}))
    text = text[:at] + patch + text[at + cut :]
    try:
        manifest.read(text, "x")
    except CheckpointError:
        pass


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_of_any_file_is_found(folder, data):
    """All that is read is as it was saved, or an error."""
    whole_state = {"w": open_saved(folder), "objects": open_saved(folder).objects(0)}
    right = {name: read(whole_state["w"], name) for name in ("w", "layers.0.bias")}
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    before = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(before[:at] + bytes([before[at] ^ (1 << bit)]) + before[at + 1 :])
    try:
        saved = open_saved(folder)
        assert path.name != manifest.NAME, "a manifest is whole or refused"
        for name, tensor in right.items():
            assert torch.equal(read(saved, name), tensor)
        assert saved.objects(0)["lr"] == 0.1
        assert saved.objects(0)["t"].tolist() == [1, 1, 1]
    except CheckpointError:
        pass
    finally:
        path.write_bytes(before)


@pytest.mark.case("a pickle is refused")
def test_a_pickle_is_refused_and_never_opened(tmp_path, monkeypatch):
    import pickle

    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    monkeypatch.setattr(pickle, "loads", lambda *a: pytest.fail("unpickled"))
    says("is a file, and a checkpoint is a folder", open_saved, tmp_path / "model.pt")
    says("is a pickle, which runs code", open_saved, tmp_path / "model.pt")


def test_what_is_no_checkpoint_says_what_would_be_one(folder, tmp_path):
    says("such as", open_saved, folder.parent)
    says("is not there", open_saved, tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    says("no manifest", open_saved, tmp_path / "other")


def test_latest_passes_over_what_is_newer_and_incomplete_and_says_so(folder):
    newer = folder.parent / "step-00000040"
    newer.mkdir()
    (newer / shard(folder).name).write_bytes(b"half")
    (folder.parent / "step-00000050").mkdir()
    (folder.parent / "notes").mkdir()
    saved, skipped = latest(folder.parent)
    assert saved is not None
    assert saved.step == 20
    assert skipped == ["step-00000040 is incomplete: no manifest"]
    assert latest(folder.parent / "nowhere") == (None, [])


def test_the_manifest_can_be_read_by_a_person(folder):
    text = (folder / manifest.NAME).read_text()
    assert re.search(r'^\{"name":"w","slot":"value","dtype":"float32","shape":\[4,3\]', text, re.M)
    assert json.loads(text)["format"] == 1
