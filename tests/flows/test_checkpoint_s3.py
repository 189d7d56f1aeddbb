"""Checkpoints on a real S3 server: saved, read in other spans, damaged, refused, and the server killed in mid-write."""

from __future__ import annotations

import secrets
import time

import pytest
import torch

from echelon.checkpoint.load import latest, open_saved
from echelon.checkpoint.meeting import alone
from echelon.checkpoint.remote import PART_BYTES, RemoteStore
from echelon.checkpoint.saver import Saver
from echelon.checkpoint.store import open_store
from echelon.clock import Deadline
from echelon.errors import CheckpointError
from echelon.events import CheckpointFailed
from echelon.mesh.layout import Key, Span
from tests.checkpoint_ranks import read, save, save_alone, whole

pytestmark = pytest.mark.needs("s3")


@pytest.fixture
def url(s3_server):
    return f"s3://{s3_server.bucket}/{secrets.token_hex(4)}"


@pytest.mark.case("checkpoints on a real S3 server")
def test_saved_by_three_ranks_and_read_in_other_spans(url):
    torch.manual_seed(0)
    state = {"w": torch.randn(2111, 3001), "b": torch.randn(7, dtype=torch.float64)}
    for step in (10, 20, 30):
        state["b"] = torch.full((7,), float(step), dtype=torch.float64)
        save(url, step, lambda rank: whole(state, 3), size=3, objects=lambda rank: {"rank": rank})[2].wait()
    saved, skipped = latest(url)
    assert (saved.step, saved.path, skipped) == (30, f"{url}/step-00000030", [])
    assert open_store(url).list("step-00000010") == {}, "two are kept"
    assert torch.equal(read(saved, "b"), state["b"])
    numel = state["w"].numel()
    for start, stop in ((0, numel // 2), (numel // 2, numel), (1_234_567, 1_234_570)):
        out = torch.empty(stop - start)
        saved.read(Key("w"), out, Span((2111, 3001), start, stop))
        assert torch.equal(out, state["w"].reshape(-1)[start:stop])
    assert [saved.objects(rank)["rank"] for rank in range(3)] == [0, 1, 2]
    assert torch.equal(
        read(open_saved(f"{url}/step-00000020"), "b"), torch.full((7,), 20.0, dtype=torch.float64)
    )


def test_a_truncated_object_is_named_and_the_older_checkpoint_taken(url):
    for step in (1, 2):
        save_alone(url, step, {"w": torch.full((1000,), float(step))})
    store = open_store(url)
    (name,) = (name for name in store.list("step-00000002") if name.startswith("shard"))
    store.put(f"step-00000002/{name}", [bytes(store.read(f"step-00000002/{name}"))[:-100]])
    saved, skipped = latest(url)
    assert saved.step == 1
    assert skipped[0].startswith(f"step-00000002 is damaged: {name} is truncated")


def test_a_wrong_key_is_refused_with_what_to_do(s3_server, url, monkeypatch):
    from fsspec.config import conf

    save_alone(url, 1, {"w": torch.ones(3)})
    monkeypatch.setitem(conf, "s3", {**s3_server.options, "secret": "wrong"})
    with pytest.raises(CheckpointError, match="AWS_SECRET_ACCESS_KEY"):
        latest(url)
    events = []
    saver = Saver(url, 0, 1, alone(), events.append)
    handle = saver.save(2, whole({"w": torch.ones(3)}, 1), None, {})
    saver.finish(Deadline.after(60))
    assert handle.state == "failed"
    assert isinstance(events[0], CheckpointFailed)


@pytest.mark.timeout(300)
def test_a_server_killed_in_mid_write_fails_the_checkpoint_and_the_old_one_loads(s3_server, url, monkeypatch):
    save_alone(url, 1, {"w": torch.ones(1000)})
    real = RemoteStore.put

    def put(self, name, chunks):
        def cut():
            sent = 0
            for chunk in chunks:
                yield chunk
                sent += len(chunk)
                if sent > 3 * PART_BYTES and s3_server.process.poll() is None:
                    s3_server.kill()

        return real(self, name, cut())

    monkeypatch.setattr(RemoteStore, "put", put)
    try:
        events = []
        saver = Saver(url, 0, 1, alone(), events.append)
        began = time.monotonic()
        handle = saver.save(2, whole({"w": torch.zeros(40_000_000)}, 1), None, {})
        saver.finish(Deadline.after(120))
        print(f"failed after {time.monotonic() - began:.1f} s: {handle.error}")
        assert s3_server.process.poll() is not None, "it was killed"
        assert handle.state == "failed"
        assert "cannot write" in handle.error
    finally:
        if s3_server.process.poll() is not None:
            s3_server.start()
        s3_server.wait()
    saved, _ = latest(url)
    assert saved.step == 1
    assert read(saved, "w").sum() == 1000
    save_alone(url, 3, {"w": torch.zeros(10)})
    assert latest(url)[0].step == 3, "and the next one works again"
