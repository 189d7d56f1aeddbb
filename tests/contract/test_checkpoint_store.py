"""The contract of Store, passed by a local folder, by fsspec's memory and by a real S3 server."""

from __future__ import annotations

import os
import secrets

import pytest

from echelon.checkpoint.remote import PART_BYTES
from echelon.checkpoint.store import open_store
from echelon.errors import CheckpointError


@pytest.fixture(
    params=["folder", "file://", "memory://", pytest.param("s3://", marks=pytest.mark.needs("s3"))]
)
def store(request, tmp_path):
    match request.param:
        case "folder":
            return open_store(tmp_path / "target")
        case "file://":
            return open_store(f"file://{tmp_path}/target")
        case "memory://":
            return open_store(f"memory://{secrets.token_hex(4)}/target")
        case _:
            server = request.getfixturevalue("s3_server")
            return open_store(f"s3://{server.bucket}/{secrets.token_hex(4)}")


def test_a_file_comes_back_whole_and_in_ranges(store):
    assert store.put("a/x", [b"hello ", bytearray(b"wide "), memoryview(b"world")]) == 16
    assert bytes(store.read("a/x")) == b"hello wide world"
    assert bytes(store.read("a/x", 6, 10)) == b"wide"
    assert bytes(store.read("a/x", 11)) == b"world"
    assert bytes(store.read("a/x", 11, 99)) == b"world", "a range past the end gives what is there"
    assert bytes(store.read("a/x", 3, 3)) == b""
    assert store.size("a/x") == 16


def test_an_empty_file_is_a_file(store):
    assert store.put("a/empty", []) == 0
    assert store.size("a/empty") == 0
    assert bytes(store.read("a/empty")) == b""


def test_what_is_not_there(store):
    assert store.size("a/x") is None
    assert store.list() == {}
    assert store.list("a") == {}
    store.remove("a/x")
    with pytest.raises(FileNotFoundError):
        store.read("a/x", 0, 10)


def test_listing_names_files_with_their_size_and_folders(store):
    store.put("top", [b"1"])
    store.put("a/x", [b"12"])
    store.put("a/y", [b"123"])
    store.put("b/z", [b""])
    assert store.list() == {"top": 1, "a": None, "b": None}
    assert store.list("a") == {"x": 2, "y": 3}
    store.remove("b/z")
    assert store.list("b") == {}


def test_a_file_is_replaced_at_once(store):
    store.put("m", [b"old"])
    store.put("m", [b"newer"])
    assert (store.size("m"), bytes(store.read("m"))) == (5, b"newer")
    assert store.list() == {"m": 5}


def test_what_raises_in_the_middle_leaves_the_old_one(store):
    store.put("a/m", [b"old"])

    def chunks():
        yield b"half of the new"
        raise CheckpointError("called off")

    with pytest.raises(CheckpointError, match="called off"):
        store.put("a/m", chunks())
    assert bytes(store.read("a/m")) == b"old"
    assert store.list("a") == {"m": 3}


def test_a_long_file_that_raises_in_the_middle_is_not_there(store):
    def chunks(num):
        for _ in range(num):
            yield bytes(PART_BYTES // 2)
        raise CheckpointError("called off")

    with pytest.raises(CheckpointError, match="called off"):
        store.put("a/long", chunks(5))
    assert store.size("a/long") is None
    assert store.list("a") == {}


def test_a_file_of_several_parts_comes_back(store):
    raw = os.urandom(PART_BYTES + 12345)
    cut = [raw[:7], raw[7:PART_BYTES], raw[PART_BYTES:]]
    assert store.put("a/long", cut * 2) == 2 * len(raw)
    assert store.size("a/long") == 2 * len(raw)
    assert bytes(store.read("a/long", len(raw) - 5, len(raw) + 5)) == raw[-5:] + raw[:5]
    assert bytes(store.read("a/long")) == raw * 2


def test_many_are_removed(store):
    for number in range(5):
        store.put(f"a/{number}", [b"x"])
    for number in range(5):
        store.remove(f"a/{number}")
    assert store.list("a") == {}


def test_a_url_that_nobody_knows_says_so():
    with pytest.raises(CheckpointError, match="fsspec knows"):
        open_store("nonsense://x/y")


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/a/x: Not a directory"):
        open_store(tmp_path / "file").put("a/x", [b""])
