"""The control wire between real processes: who gets in, what comes back, and what survives a restart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from echelon.clock import Deadline
from echelon.control import frames, member
from echelon.control.rpc import Client, Identity
from echelon.errors import AuthError, PeerLost, UsageError, WorldError
from echelon.events import Beat, Failed, Logged, Metric, Warned, from_dict
from echelon.launch import meeting
from tests.flows.live_coordinator import coordinator


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.mark.case("authenticated control plane")
@pytest.mark.parametrize(("token", "run"), [("0" * 64, "test-run"), ("", "another-run")])
def test_a_wrong_token_or_run_is_refused_within_a_second(tmp_path, token, run):
    with coordinator(tmp_path) as live:
        live.client().close()  # it is up
        began = time.monotonic()
        with pytest.raises(AuthError, match="refused") as caught:
            live.client(token=token, run=run)
        assert time.monotonic() - began < 1.0
        assert caught.value.remedy


def test_a_silent_stranger_is_closed_within_a_second(tmp_path):
    with coordinator(tmp_path) as live:
        live.client().close()
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", int(live.address.split(":")[1])), timeout=5) as stranger:
            stranger.sendall(b"\x00\x00")
            with pytest.raises((ConnectionError, AssertionError)):
                assert stranger.recv(1) != b""
        assert time.monotonic() - began < 1.2


def test_strangers_beyond_the_limit_are_closed_at_once_and_a_proper_client_still_gets_in(tmp_path):
    with coordinator(tmp_path) as live:
        live.client().close()
        port = int(live.address.split(":")[1])
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(80)]
        try:
            client = live.client()
            assert client.call("store.count", soon()) == 0
            client.close()
        finally:
            for stranger in strangers:
                stranger.close()


def test_a_server_that_does_not_know_the_token_is_told_apart():
    listening = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        wire, _ = listening.accept()
        with wire:
            wire.recv(4096)
            wire.sendall(frames.hello({"nonce": b"n" * 32}))
            wire.recv(4096)
            wire.sendall(frames.hello({"proof": b"p" * 32}))

    thread = threading.Thread(target=impostor)
    thread.start()
    try:
        with pytest.raises(AuthError, match="does not know the run's token"):
            Client.connect(
                f"127.0.0.1:{listening.getsockname()[1]}", "t" * 64, Identity("r", "worker", 0), soon()
            )
    finally:
        thread.join(5)
        listening.close()


def test_nobody_there_is_said_with_address_and_interface():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(WorldError, match=rf"{address}.*over lo: refused"):
        Client.connect(address, "t" * 64, Identity("r", "worker", 0), soon(0.3))


def test_errors_come_back_as_their_own_class_and_the_connection_lives_on(tmp_path):
    with coordinator(tmp_path) as live:
        client = live.client()
        with pytest.raises(UsageError, match="no method"):
            client.call("os.system", soon())
        with pytest.raises(UsageError, match="amount must be int"):
            client.call("store.add", soon(), key="k", amount="1")
        with pytest.raises(UsageError, match="needs 'amount'"):
            client.call("store.add", soon(), key="k")
        with pytest.raises(UsageError, match="a worker may not call died"):
            client.call("died", soon(), rank=0, code=1)
        with pytest.raises(UsageError, match="cannot travel"):
            client.call("store.set", soon(), key="k", value=object())
        with pytest.raises(UsageError, match="16 MiB"):
            client.call("store.set", soon(), key="k", value=bytes(17 << 20))
        assert client.call("store.add", soon(), key="k", amount=2) == 2
        client.close()


def test_a_long_wait_holds_up_nobody_and_ends_when_its_caller_goes(tmp_path):
    with coordinator(tmp_path) as live:
        waiting, other = live.client(0), live.client(1)
        answers: list[object] = []

        def wait() -> None:
            try:
                answers.append(waiting.call("store.get", soon(30), key="late", timeout_s=30.0))
            except WorldError as error:
                answers.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        for number in range(50):
            assert other.call("store.add", soon(), key="n", amount=1) == number + 1
        other.call("store.set", soon(), key="late", value=b"here")
        thread.join(10)
        assert answers == [b"here"]
        with pytest.raises(WorldError, match=r"did not come within 0\.1 s: 'never'"):
            other.call("store.wait", soon(), keys=["late", "never"], timeout_s=0.1)
        waiting.close()
        other.close()


def test_a_call_that_ran_out_of_time_leaves_a_connection_that_works(tmp_path):
    with coordinator(tmp_path) as live:
        client = live.client()
        with pytest.raises(WorldError, match="did not answer in time"):
            client.call("store.get", soon(0.2), key="never", timeout_s=30.0)
        assert client.call("store.add", soon(), key="n", amount=1) == 1
        client.close()


def test_a_death_ends_the_waits_of_the_others_and_names_the_rank(tmp_path):
    with coordinator(tmp_path) as live:
        members = [live.member(rank) for rank in range(2)]
        supervisor = live.client(role="supervisor")
        dying = threading.Timer(0.2, lambda: supervisor.call("died", soon(), rank=1, code=137))
        dying.start()
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 .*signal 9") as caught:
            members[0].call("store.get", soon(30), key="from-1", timeout_s=30.0, term=1)
        assert time.monotonic() - began < 3.0
        assert caught.value.peers == (1,)
        assert members[0].roster()[1]["state"] == "dead"
        with pytest.raises(PeerLost):  # later waits of that term do not start either
            members[0].call("store.wait", soon(30), keys=["x"], timeout_s=30.0, term=1)
        dying.join()  # its answer may come after the others'
        supervisor.close()
        for member in members:
            member.close()


def test_a_forked_child_does_not_hold_the_socket(tmp_path):
    with coordinator(tmp_path) as live:
        member = live.member()
        held = [
            os.readlink(f"/proc/self/fd/{c._socket.fileno()}")
            for c in (member._calls,)
            if c._socket is not None
        ]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:  # the child: no pytest from here on
            try:
                still = {
                    os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)
                }
                try:
                    member.call("roster", soon(1))
                    said = "it answered"
                except UsageError:
                    said = "closed"
                member.emit(Warned(message="from the child"))
                member.close()
                os.write(writing, f"{len(still & set(held))} {said}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            assert pipe.read() == "0 closed"
        assert len(held) == 1
        assert member.roster()[0]["state"] == "joined"  # the parent's is untouched
        member.close()


def _is_link(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


def test_a_restarted_coordinator_continues_its_term_and_its_table(tmp_path):
    with coordinator(tmp_path) as live:
        members = [live.member(rank) for rank in range(2)]
        supervisor = live.member(role="supervisor")
        assert [m.term for m in members] == [1, 1]  # forming the run is no change of it
        members[0].call("store.set", soon(), key="k", value=b"v")
        supervisor.call("died", soon(), rank=1, code=1)
        supervisor.call("stop", soon(), reason="enough")
        before = members[0].roster()
        live.kill()
        members[0].emit(Warned(message="said while it was away"))
        live.start()
        assert members[0].roster() == before  # found again without a word
        assert members[0].call("store.get", soon(), key="k", timeout_s=1.0) == b"v"
        members[0].close()
        assert members[0].term == 2
        assert members[0].stop_requested
        assert "said while it was away" in (tmp_path / "events.jsonl").read_text()
        members[1].close()
        supervisor.close()
        terms = [
            json.loads(line)["term"]
            for line in (tmp_path / "journal.jsonl").read_text().splitlines()
            if '"term"' in line
        ]
        assert terms == [1, 1, 2, 2]


def test_events_reach_the_watcher_and_the_file_and_logs_are_averaged(tmp_path):
    with coordinator(tmp_path) as live:
        members = [live.member(rank) for rank in range(2)]
        watcher = live.member(role="supervisor")
        members[0].report = lambda: Beat(step=7, doing="forward")
        for rank, member in enumerate(members):
            member.emit(Logged(step=1, values={"loss": float(rank)}, weight=1.0 + 2 * rank))
        members[1].emit(Failed(host="here", step=3, code=1, error="ValueError", traceback="x" * 200_000))
        seen, after, deadline = [], 0, soon()
        while not deadline.passed and not {"Metric", "Failed"} <= {e["event"] for e in seen}:
            answer = watcher.call("watch", soon(), after=after, timeout_s=2.0)
            seen, after = seen + answer["events"], answer["next"]
        metrics = [from_dict(e) for e in seen if e["event"] == "Metric"]
        assert [(m.step, m.values) for m in metrics if isinstance(m, Metric)] == [(1, {"loss": 0.75})]
        assert not [e for e in seen if e["event"] == "Logged"]
        beats = [e for e in seen if e["event"] == "Beat" and e["rank"] == 0]
        assert any("test_rpc.py" in line for beat in beats for line in beat["stack"])
        assert next(len(e["traceback"]) for e in seen if e["event"] == "Failed") < 70_000
        for member in [*members, watcher]:
            member.close()
        assert live.close() == 0
    kinds = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds.count("Metric") == 1
    assert kinds.count("Beat") <= 4
    assert "Logged" not in kinds


def test_a_wait_of_a_client_that_vanished_is_given_up(tmp_path):
    with coordinator(tmp_path) as live:
        base = live.client()
        assert base.call("store.count", soon()) == 0
        for _ in range(20):
            waiting = live.client(1)
            with pytest.raises(WorldError):
                waiting.call("store.get", soon(0.02), key="never", timeout_s=3000.0)
            waiting.close()
        sockets = _open_sockets(live.process.pid)
        deadline = soon()
        while sockets > 3 and not deadline.passed:
            base.call("store.wait", soon(), keys=[], timeout_s=0.0)
            sockets = _open_sockets(live.process.pid)
        assert sockets <= 3
        base.close()


def _open_sockets(pid: int) -> int:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links) - 2  # the event loop's own pair


def test_hosts_form_although_the_coordinator_ends_while_they_try_to_reach_each_other(tmp_path, monkeypatch):
    with coordinator(tmp_path, num_hosts=2) as live:
        real, ended = meeting.reach, threading.Event()

        def reach(me, others):
            found = real(me, others)
            if not ended.is_set():
                ended.set()
                live.kill()
                live.start()
            return found

        monkeypatch.setattr(meeting, "reach", reach)
        monkeypatch.setattr(meeting, "_try", lambda me, host: "")
        monkeypatch.setattr(meeting, "_probe", lambda address: contextlib.nullcontext(1))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            wires = [live.client(0, "supervisor"), live.joiner(7)]
            hosts = [meeting.Me("h0", "10.77.0.1"), meeting.Me("h1", "10.77.0.2")]
            both = [
                pool.submit(meeting.meet, w, me, Deadline.after(60))
                for w, me in zip(wires, hosts, strict=True)
            ]
            assert [one.result(90).mine.name for one in both] == ["h0", "h1"]
        for wire in wires:
            wire.close()


def test_a_look_at_the_main_thread_that_raises_does_not_end_the_beats(tmp_path, monkeypatch):
    def raising(beat, rank):
        raise AttributeError("'dict' object has no attribute 'f_code'")

    monkeypatch.setattr(member, "complete", raising)
    with coordinator(tmp_path) as live:
        mine = live.member(0)
        mine.report = lambda: Beat(step=4)
        began = time.monotonic()
        while mine.roster()[0]["step"] != 4 or mine.answered < began + 2.0:
            assert time.monotonic() - began < 30.0, "no beats"
            time.sleep(0.1)
        mine.close()
