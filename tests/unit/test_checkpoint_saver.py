"""Saving by several ranks: any spans back from any spans, complete everywhere or nowhere, and what is kept."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.checkpoint import agree, attempt, saver, store
from echelon.checkpoint.holding import Holding
from echelon.checkpoint.load import latest, open_saved
from echelon.checkpoint.meeting import Room, alone
from echelon.checkpoint.prune import to_remove
from echelon.checkpoint.saver import Saver
from echelon.clock import Deadline
from echelon.errors import CheckpointError, WorldError
from echelon.events import CheckpointFailed, CheckpointSaved, Warned
from echelon.mesh.layout import Key, Span
from tests.checkpoint_ranks import bits, cut, read, save, save_alone, together, whole


def bounds(draw, numel: int, ranks: int) -> list[int]:
    inner = sorted(draw(st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1)))
    return [0, *inner, numel]


@pytest.mark.case("saved at 4, read at 1, 2, 3, 6, 8")
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_saved_by_four_ranks_and_read_by_any_number_in_any_spans_is_bit_equal(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
    )
    tensor = (torch.randn(shape) * 3).to(dtype)
    other = torch.randn(5, 4).t()
    parts = bounds(data.draw, tensor.numel(), 4)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, 3, lambda rank: [cut("w", tensor, parts, rank), *whole({"other": other}, 4)], size=4)[
            0
        ].wait()
        saved, _ = latest(folder)
        assert torch.equal(read(saved, "other"), other)
        for readers in (1, 2, 3, 6, 8):
            wanted = bounds(data.draw, tensor.numel(), readers)
            got = []
            for start, stop in itertools.pairwise(wanted):
                out = torch.empty(2 * (stop - start), dtype=dtype)[::2]  # not contiguous
                saved.read(Key("w"), out, Span(shape, start, stop))
                got.append(out)
            assert bits(torch.cat(got)) == bits(tensor)


def test_large_tensors_are_cut_over_ranks_and_read_across_blocks(tmp_path):
    torch.manual_seed(0)
    state = {"big": torch.randn(5, 2_000_003), "small": torch.randn(7), "turned": torch.randn(1003, 999).t()}
    save(tmp_path, 1, lambda rank: whole(state, 3), size=3)[0].wait()
    sizes = [path.stat().st_size for path in tmp_path.glob("*/shard-*")]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 10_000, "all write alike much"
    saved, _ = latest(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(read(saved, name), tensor)
    out = torch.empty(3_000_000)
    saved.read(Key("big"), out, Span((5, 2_000_003), 4_000_001, 7_000_001))
    assert torch.equal(out, state["big"].reshape(-1)[4_000_001:7_000_001])


def test_replicated_and_sharded_tensors_are_each_written_once(tmp_path):
    """Two replicas of two shards, beside a tensor that all hold."""
    tensor, common = torch.arange(1_000_000.0), torch.randn(300_000)

    def held(rank):
        half = rank % 2
        span = Span((1_000_000,), half * 500_000, (half + 1) * 500_000)
        return [
            Holding(Key("w"), tensor[span.start : span.stop], span, (half, half + 2)),
            *whole({"c": common}, 4),
        ]

    save(tmp_path, 1, held, size=4)[0].wait()
    pieces = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["tensors"]
    assert [sum(p["stop"] - p["start"] for p in row["pieces"]) for row in pieces] == [300_000, 1_000_000]
    saved, _ = latest(tmp_path)
    assert torch.equal(read(saved, "w"), tensor)
    assert Counter(p["file"][:11] for row in pieces for p in row["pieces"]).keys() == {
        f"shard-0000{r}" for r in range(4)
    }


def test_objects_of_each_rank_come_back_and_equal_ones_are_written_once(tmp_path):
    save(tmp_path, 1, lambda rank: [], size=4, objects=lambda rank: {"seed": rank // 2, "t": torch.ones(2)})[
        0
    ].wait()
    saved, _ = latest(tmp_path)
    assert [saved.objects(rank)["seed"] for rank in (0, 1, 2, 3, 9)] == [0, 0, 1, 1, 0]
    assert len(list(tmp_path.glob("*/objects-*.json"))) == 3, "rank 1 has what rank 0 has"
    assert saved.about == {"size": 4}
    assert (saved.world_size, saved.step) == (4, 1)


def test_the_ten_lines_of_the_documentation_read_it_without_echelon(tmp_path):
    state = {"w": torch.randn(3, 400_000), "b": torch.randn(5)}
    save(tmp_path, 20, lambda rank: whole(state, 2), size=2)[0].wait()
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    program = (
        program.replace("runs/latest/checkpoints", str(tmp_path))
        + f"torch.save(state, '{tmp_path}/state.pt')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


# beside training


def test_the_copy_runs_beside_and_before_change_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "AT_ONCE_BYTES", 0)
    copying, go = threading.Event(), threading.Event()
    real = attempt.Snapshot.copy_rest

    def slow(self):
        copying.set()
        assert go.wait(30)
        real(self)

    monkeypatch.setattr(attempt.Snapshot, "copy_rest", slow)
    settled, loose = torch.zeros(1000), torch.zeros(1000)
    one = Saver(tmp_path, 0, 1, alone(), lambda event: None)
    held = whole({"settled": settled}, 1) + whole({"loose": loose}, 1, settled=False)
    handle = one.save(1, held, None, {})
    assert copying.wait(30)
    assert handle.state == "copying"
    loose += 1  # copied already
    threading.Timer(0.3, go.set).start()
    one.before_change()
    settled += 1
    one.finish(Deadline.after(30))
    saved = open_saved(handle.wait().path)
    assert read(saved, "settled").sum() == 0
    assert read(saved, "loose").sum() == 0
    assert 0.2 < one.stall_s < 10
    assert handle.state == "complete"


def test_small_states_are_copied_at_once(tmp_path):
    w = torch.zeros(10)
    one = Saver(tmp_path, 0, 1, alone(), lambda event: None)
    handle = one.save(1, whole({"w": w}, 1), None, {})
    w += 1
    assert read(open_saved(handle.wait(Deadline.after(30)).path), "w").sum() == 0


def test_a_save_waits_for_the_one_before_and_says_so_once(tmp_path, monkeypatch):
    real = store.LocalStore.put

    def slow(self, name, chunks):
        time.sleep(0.1)
        return real(self, name, chunks)

    monkeypatch.setattr(store.LocalStore, "put", slow)
    events = []
    one = Saver(tmp_path, 0, 1, alone(), events.append)
    handles = [one.save(step, whole({"w": torch.ones(3)}, 1), None, {}) for step in (1, 2, 3)]
    one.finish(Deadline.after(30))
    assert [handle.state for handle in handles] == ["complete"] * 3
    assert [type(event) for event in events] == [Warned, CheckpointSaved, CheckpointSaved, CheckpointSaved]
    assert "took longer than the steps between" in events[0].message
    assert one.stall_s > 0.2


def test_the_event_tells_what_it_cost(tmp_path):
    events = []
    save_alone(tmp_path, 7, {"w": torch.ones(1000)}, emit=events.append)
    (event,) = events
    assert (event.step, event.path) == (7, str(tmp_path / "step-00000007"))
    assert event.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert min(event.copy_s, event.write_s, event.stall_s) >= 0


# complete everywhere or nowhere


def failing(monkeypatch, rank, error=None, only="shard"):
    """Rank `rank` cannot write its files."""
    real = store.LocalStore.put

    def put(self, name, chunks):
        if f"{only}-{rank:05d}" in name or (only == "manifest" and "manifest" in name):
            next(iter(chunks))
            raise error or CheckpointError("cannot write x: the disk is full", remedy="Free some space.")
        return real(self, name, chunks)

    monkeypatch.setattr(store.LocalStore, "put", put)


@pytest.mark.case("one rank's failure fails a checkpoint everywhere")
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_rank_that_cannot_write_fails_it_everywhere_and_the_old_one_stays(tmp_path, monkeypatch, rank):
    state = {"w": torch.randn(10, 1000, 100)}
    save(tmp_path, 1, lambda r: whole(state, 4), size=4)[0].wait()
    failing(monkeypatch, rank)
    events = []
    began = time.monotonic()
    handles = save(tmp_path, 2, lambda r: whole(state, 4), size=4, emit=events.append)
    assert time.monotonic() - began < 10
    assert {handle.state for handle in handles} == {"failed"}
    assert len({handle.error for handle in handles}) == 1
    assert f"rank {rank} on " in handles[0].error
    assert "the disk is full" in handles[0].error
    (event,) = events
    assert isinstance(event, CheckpointFailed)
    assert event.kept == str(tmp_path / "step-00000001")
    assert not (tmp_path / "step-00000002").exists(), "partial files are gone"
    saved, skipped = latest(tmp_path)
    assert (saved.step, skipped) == (1, [])
    with pytest.raises(CheckpointError, match="step 2 failed"):
        handles[1].wait()


@pytest.mark.parametrize("error", [None, RuntimeError("boom"), MemoryError()])
def test_a_manifest_that_cannot_be_written_fails_it_everywhere(tmp_path, monkeypatch, error):
    failing(monkeypatch, 0, error, only="manifest")
    handles = save(tmp_path, 2, lambda r: whole({"w": torch.ones(9)}, 2), size=2)
    assert {handle.state for handle in handles} == {"failed"}
    assert latest(tmp_path) == (None, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_dies_ends_it_for_the_others(tmp_path, gone):
    room = Room(3)
    state = {"w": torch.ones(100)}

    def act(rank):
        if rank == gone:
            threading.Timer(0.3, room.lose, [rank]).start()
            return None
        one = Saver(tmp_path, rank, 3, room.meeting(rank), lambda event: None)
        handle = one.save(1, whole(state, 3), None, {})
        one.finish(Deadline.after(30))
        return handle

    handles = [handle for handle in together(3, act) if handle is not None]
    assert {handle.state for handle in handles} == {"failed"}
    assert all(f"rank {gone} ended" in handle.error for handle in handles)
    assert list(tmp_path.iterdir()) == []


def test_files_stay_when_rank_0_died_while_it_committed(tmp_path):
    """After the word "commit" nobody but rank 0 knows whether a manifest names the files: they are left."""
    room = Room(2)

    def act(rank):
        one = Saver(tmp_path, rank, 2, room.meeting(rank), lambda event: None)
        handle = one.save(1, whole({"w": torch.ones(10)}, 2), None, {})
        one.finish(Deadline.after(30))
        return handle

    def dying(rank):
        if rank == 1:
            return act(1)
        meeting = room.meeting(0)
        meeting.settle("000000-1/objects", b"none")
        assert meeting.heard("000000-1/notes", Deadline.after(0.0)) is None
        meeting.settle("000000-1/fate", agree.COMMIT)
        threading.Timer(0.5, room.lose, [0]).start()
        return None

    handle = together(2, dying)[1]
    assert handle.state == "failed"
    assert list(tmp_path.glob("*/objects-00001*")), "what rank 1 wrote is still there"


def test_hosts_without_a_shared_folder_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "SEE_S", 0.2)
    room = Room(2)

    def act(rank):
        one = Saver(tmp_path / f"host{rank}", rank, 2, room.meeting(rank), lambda event: None)
        handle = one.save(1, whole({"w": torch.ones(10)}, 2), {"rank": rank}, {})
        one.finish(Deadline.after(30))
        return handle

    handles = together(2, act)
    assert "rank 1 on" in handles[0].error
    assert f"{tmp_path}/host1/step-00000001/" in handles[0].error
    assert "checkpoint_dir must be a folder that all hosts share" in handles[1].error
    assert not list(tmp_path.glob("host*/*"))


def test_ranks_with_different_models_are_told(tmp_path):
    shapes = {0: (2, 3), 1: (2, 4)}
    handles = save(
        tmp_path, 1, lambda r: [Holding(Key("w"), torch.ones(shapes[r]), Span.whole(shapes[r]), (r,))], size=2
    )
    assert "the ranks do not train the same model" in handles[0].error.lower()
    handles = save(
        tmp_path, 1, lambda r: [Holding(Key("w"), torch.ones(2), Span((9,), 2 * r, 2 * r + 2), (r,))], size=2
    )
    assert "element 4 is in none" in handles[1].error


def test_what_no_checkpoint_can_hold_is_refused_before_anything_is_written(tmp_path):
    one = Saver(tmp_path, 0, 1, alone(), lambda event: None)
    with pytest.raises(CheckpointError, match=r"objects\['f'\]"):
        one.save(1, [], {"f": print}, {})
    with pytest.raises(CheckpointError, match="must be JSON"):
        one.save(1, [], None, {"x": math.nan})
    with pytest.raises(CheckpointError, match="to_dense"):
        one.save(1, whole({"s": torch.eye(3).to_sparse()}, 1), None, {})
    with pytest.raises(CheckpointError, match="copies are"):
        one.save(1, [Holding(Key("w"), torch.ones(1), Span.whole((1,)), (1,))], None, {})
    with pytest.raises(CheckpointError, match="6 elements are held as"):
        one.save(1, [Holding(Key("w"), torch.ones(6), Span((7,), 0, 7), (0,))], None, {})
    save_handle = one.save(1, whole({"w": torch.ones(1)}, 1), None, {})
    assert save_handle.wait(Deadline.after(30)).state == "complete"


def test_a_rank_that_cannot_even_begin_does_not_leave_the_others_waiting(tmp_path):
    room = Room(2)

    def act(rank):
        one = Saver(tmp_path, rank, 2, room.meeting(rank), lambda event: None)
        states = []
        for step, tree in ((1, None), (2, print if rank == 1 else None), (3, None)):
            try:
                handle = one.save(step, whole({"w": torch.ones(9)}, 2), tree, {})
                one.finish(Deadline.after(30))
                states.append(handle.state)
            except CheckpointError:
                states.append("refused")
        return states, handle.error, one.last.error

    began = time.monotonic()
    (first, _, _), (second, _, _) = together(2, act)
    assert first == ["complete", "failed", "complete"]
    assert second == ["complete", "refused", "complete"]
    assert time.monotonic() - began < 20


# what is kept


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save_alone(tmp_path, step, {"w": torch.full((3,), float(step))}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    save_alone(tmp_path, 6, {"w": torch.ones(3)}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_saving_a_step_again_replaces_it_and_strays_go(tmp_path):
    save_alone(tmp_path, 4, {"w": torch.zeros(3)})
    folder = tmp_path / "step-00000004"
    (folder / "shard-00007.abcdef.safetensors").write_bytes(b"of a killed attempt")
    (folder / ".shard-00000.aa.partial").write_bytes(b"")
    stray = tmp_path / "step-00000003"
    stray.mkdir()
    (stray / "shard-00000.abcdef.safetensors").write_bytes(b"of another")
    newer = tmp_path / "step-00000009"
    newer.mkdir()
    save_alone(tmp_path, 4, {"w": torch.ones(3)})
    assert len(list(folder.iterdir())) == 3, "shard, objects, manifest"
    assert read(open_saved(folder), "w").sum() == 3
    assert not stray.exists()
    assert newer.exists(), "somebody may be writing it"


@pytest.mark.parametrize(
    ("folders", "saved", "keep", "going"),
    [
        ({"step-00000001": True}, "step-00000001", 1, []),
        ({"step-00000001": True, "step-00000002": True, "step-00000003": True}, "step-00000003", 2, ["step-00000001"]),
        ({"step-00000001": False, "step-00000002": True}, "step-00000002", 1, ["step-00000001"]),
        ({"step-00000005": False, "step-00000002": True}, "step-00000002", 1, []),
        ({"step-00000009": True, "step-00000002": True}, "step-00000002", 1, []),
        ({"step-00000001": True, "step-00000002": True}, "step-00000002", 0, ["step-00000001"]),
        ({"notes": True, "step-1": True, "step-00000002": True}, "step-00000002", 1, []),
    ],
)  # fmt: skip
def test_what_goes(folders, saved, keep, going):
    assert to_remove(folders, saved, keep) == going


def test_an_empty_checkpoint_is_one(tmp_path):
    save(tmp_path, 0, lambda rank: [], size=2)[1].wait()
    saved, _ = latest(Path(tmp_path))
    assert (saved.keys(), saved.objects(1)) == ([], None)


def test_when_rank_0_loses_the_answer_to_its_word_nobody_waits_for_it(tmp_path):
    """The coordinator took "commit" and was gone before it said so: rank 0 fails, and says that it does."""
    room = Room(2)

    class Broken:
        def __init__(self, meeting):
            self._meeting, self.lost = meeting, False

        def __getattr__(self, name):
            return getattr(self._meeting, name)

        def settle(self, topic, word):
            held = self._meeting.settle(topic, word)
            if word == agree.COMMIT and not self.lost:
                self.lost = True
                raise WorldError("the connection to the coordinator broke")
            return held

    def act(rank):
        meeting = room.meeting(rank) if rank else Broken(room.meeting(0))
        one = Saver(tmp_path, rank, 2, meeting, lambda event: None)
        states = []
        for step in (1, 2):
            handle = one.save(step, whole({"w": torch.ones(10)}, 2), None, {})
            one.finish(Deadline.after(30))
            states.append(handle.state)
        return states

    assert together(2, act) == [["failed", "complete"], ["failed", "complete"]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_state_that_looks_the_same_is_planned_once_and_nothing_of_it_is_kept(tmp_path):
    one = Saver(tmp_path, 0, 1, alone(), lambda event: None)
    plans, alive = [], []
    for step, state in enumerate(({"a": torch.ones(5), "b": torch.zeros(3, 2)}, {"a": torch.full((5,), 2.0), "b": torch.ones(3, 2)},
                                  {"a": torch.ones(6), "b": torch.ones(3, 2)}, {"a": torch.ones(6), "b": torch.ones(3, 2).half()}), 1):  # fmt: skip
        one.save(step, whole(state, 1), None, {}).wait(Deadline.after(30))
        plans.append(one._plan)
        saved = open_saved(tmp_path / f"step-{step:08d}")
        assert all(torch.equal(read(saved, name), tensor) for name, tensor in state.items())
        one.before_change()
        alive.append([weakref.ref(tensor) for tensor in state.values()])
    assert plans[0] is plans[1] is not plans[2] is not plans[3]
    del state
    one.finish(Deadline.after(30))
    assert [ref() for refs in alive[:-1] for ref in refs] == [None] * 6


def test_gathering_the_state_counts_as_stall(tmp_path):
    told = []
    one = Saver(tmp_path, 0, 1, alone(), told.append)
    one.save(1, whole({"a": torch.ones(5)}, 1), None, {}, since=time.monotonic() - 7.0).wait(
        Deadline.after(30)
    )
    one.finish(Deadline.after(30))
    assert told[0].stall_s >= 7.0
    assert one.stall_s >= 7.0
