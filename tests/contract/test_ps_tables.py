"""The direct API: tables with optimizers on one server or several, in shared memory and over TCP."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

import echelon
from echelon.errors import LinkLost, UsageError, WorldError
from echelon.ps import memory
from echelon.ps.client import SERVE, Client
from echelon.ps.host import Host
from echelon.ps.tables import PIECE_BYTES, Tables

TOKEN = "t" * 64
RECIPES = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
]


@contextlib.contextmanager
def servers(num: int, shared: bool = True):
    """Addresses of so many servers, and their tables."""
    with contextlib.ExitStack() as stack:
        tables = [Tables() for _ in range(num)]
        hosts = [stack.enter_context(Host({"tables": t}, TOKEN, SERVE, shared=shared)) for t in tables]
        yield ",".join(host.address for host in hosts), tables


def connect(address: str) -> Client:
    return echelon.ps.connect(address, token=TOKEN)


def numbers_of(options: dict) -> dict:
    plain = {k: v for k, v in options.items() if k != "betas"}
    return plain | (
        dict(zip(("beta1", "beta2"), options["betas"], strict=True)) if "betas" in options else {}
    )


@pytest.mark.case("ps: the direct API equals torch's optimizers")
@pytest.mark.parametrize(
    ("num", "shared"), [(1, True), (1, False), (3, True)], ids=["shared memory", "tcp", "3 servers"]
)
@pytest.mark.parametrize(("name", "optimizer", "options"), RECIPES)
def test_two_clients_that_push_in_turn_end_where_torch_ends(num, shared, name, optimizer, options):
    torch.manual_seed(0)
    start = {
        "small": torch.randn(7, 3, dtype=torch.float64),
        "large": torch.randn(300, 701, dtype=torch.float64),
    }
    theirs = {key: torch.nn.Parameter(x.clone()) for key, x in start.items()}
    torchs = optimizer(theirs.values(), **options)
    with servers(num, shared) as (address, _), connect(address) as one, connect(address) as two:
        for client in (one, two):
            for key, x in start.items():
                client.create(key, x, name, **numbers_of(options))
        for step in range(6):
            works = {}
            for key, p in theirs.items():
                p.grad = torch.randn_like(p)
                works[key] = (one, two)[step % 2].push_pull(key, p.grad)
            torchs.step()
            for key, work in works.items():
                assert (work.wait() - theirs[key]).abs().max() <= 1e-12
                assert work.version == step + 1
        for key, p in theirs.items():
            assert (one.pull(key).wait() - p).abs().max() <= 1e-12


@pytest.mark.case("ps: a pull sees whole updates")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_pull_beside_pushes_of_others_sees_whole_updates_only(shared):
    """All elements move together, so any two that differ would be half an update."""
    numel = 5 * PIECE_BYTES // 4 + 17
    rounds, wrong = 12, []

    def pushes(address: str) -> None:
        with connect(address) as client:
            grad = torch.ones(numel)
            for _ in range(rounds):
                got = client.push_pull("w", grad).wait()
                if got.min() != got.max():
                    wrong.append("push_pull")

    def pulls(address: str) -> None:
        with connect(address) as client:
            last = 1.0
            for _ in range(rounds):
                got = client.pull("w").wait()
                if got.min() != got.max() or got[0] > last:
                    wrong.append("pull")
                last = float(got[0])

    with servers(1, shared) as (address, _), connect(address) as client:
        client.create("w", torch.zeros(numel), lr=1.0)
        threads = [threading.Thread(target=work, args=(address,)) for work in (pushes, pushes, pulls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.pull("w").wait().eq(-2.0 * rounds).all()
        assert client.tables()["w"]["version"] == 2 * rounds


def test_values_come_back_in_the_kind_and_the_memory_that_was_given():
    with servers(1) as (address, _), connect(address) as client:
        client.create("array", np.zeros((2, 3), np.float32), lr=1.0)
        client.create("tensor", torch.zeros(2, 3), lr=1.0)
        ones = np.ones((2, 3), np.float32)
        got = client.push_pull("array", ones).wait()
        assert isinstance(got, np.ndarray)
        assert (got == -1).all()
        assert isinstance(client.pull("array").wait(), np.ndarray)
        out = np.empty((2, 3), np.float32)
        assert client.pull("array", out).wait() is out
        assert (out == -1).all()
        assert (client.push_pull("array", np.broadcast_to(np.float32(1), (2, 3))).wait() == -2).all()
        client.create("scalar", np.array(5.0), lr=1.0)
        assert client.push_pull("scalar", np.array(2.0)).wait().shape == ()
        strided = torch.zeros(3, 2).t()
        assert client.push_pull("tensor", torch.ones(3, 2).t(), strided).wait() is strided
        assert strided.eq(-1).all()
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        assert client.pull("tensor", weight).wait() is weight
        assert weight.eq(-1).all()
        assert client.push("tensor", torch.ones(2, 3)).wait() is None
        assert isinstance(client.pull("tensor").wait(), torch.Tensor)


def test_an_answer_is_its_own_memory_which_comes_back_when_nothing_views_it_any_more():
    numel = 300_000
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.zeros(numel), lr=1.0)
        arena = client._links[0]._arena
        kept = [client.push_pull("w", torch.ones(numel)).wait() for _ in range(4)]
        assert [float(x[-1]) for x in kept] == [
            -1.0,
            -2.0,
            -3.0,
            -4.0,
        ]  # later answers leave earlier ones alone
        assert all(arena.find(x.data_ptr(), x.nbytes) for x in kept)
        ends = [x[-10:] for x in kept]
        del kept
        for _ in range(4):
            client.push_pull("w", torch.ones(numel)).wait()
        assert [float(x[0]) for x in ends] == [-1.0, -2.0, -3.0, -4.0]  # a view holds the whole
        held, ends = arena.num_bytes, []
        for _ in range(50):
            client.push_pull("w", torch.ones(numel)).wait()
        assert arena.num_bytes == held
        last = client.pull("w").wait()
    assert float(last.sum()) == -58.0 * numel  # also behind the client's end
    assert float(last.zero_().sum()) == 0.0


def test_a_strided_out_is_filled_by_the_clients_wait_also_where_the_answer_came_before_it():
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.ones(40, 30))
        out = torch.zeros(30, 40).t()
        work = client.pull("w", out)
        client.pull("w").wait()
        assert work.done
        client.wait()
        assert torch.equal(out, torch.ones(40, 30))


def test_who_keeps_very_many_answers_gets_ordinary_memory_for_them(monkeypatch):
    numel = 100_000
    monkeypatch.setattr(memory, "LENT_BYTES", 3 * numel * 4)
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.ones(numel))
        arena = client._links[0]._arena
        kept = [client.pull("w").wait() for _ in range(5)]
        assert [arena.find(x.data_ptr(), x.nbytes) is not None for x in kept] == [True] * 3 + [False] * 2
        assert all(torch.equal(x, torch.ones(numel)) for x in kept)


def test_an_answer_that_is_pushed_again_and_let_go_stays_until_it_was_taken():
    numel = 1_000_000
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.ones(numel), lr=1.0)
        client.create("v", torch.zeros(numel), lr=1.0)
        for _ in range(8):
            client.push("w", client.pull("w").wait())  # nobody holds it from here on
            client.push_pull("v", torch.full((numel,), 7.0))
        client.wait()
        assert torch.equal(client.pull("w").wait(), torch.zeros(numel))


def test_buffers_travel_without_a_copy_and_count_the_same():
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.zeros(70_000), lr=1.0)
        grad, out = client.buffer("w"), client.buffer("w")
        grad.fill_(2)
        assert client.push_pull("w", grad, out).wait() is out
        assert out.eq(-2).all()


def test_numbers_given_with_a_push_hold_for_it():
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.zeros(3), lr=1.0)
        assert client.push_pull("w", torch.ones(3), lr=0.5).wait().eq(-0.5).all()
        assert client.push_pull("w", torch.ones(3)).wait().eq(-1.5).all()
        with pytest.raises(UsageError, match="sgd has no number 'rate'"):
            client.push("w", torch.ones(3), rate=1).wait()
        assert client.pull("w").wait().eq(-1.5).all()


@pytest.mark.case("ps: wrong names and shapes are told to who caused them")
def test_what_does_not_fit_is_told_with_both_sides():
    with servers(2) as (address, _), connect(address) as client, connect(address) as other:
        client.create("weights", torch.zeros(4), "adam")
        client.create("weights", torch.ones(4), "adam")
        assert other.pull("weights").wait().eq(0).all()
        for wrong, what in (
            (lambda: other.push("weights", torch.zeros(5)), r"shape \[5\] was given, .* shape \[4\]"),
            (lambda: other.push("weights", torch.zeros(4).double()), "a float64 .* is float32"),
            (lambda: other.pull("weights", torch.zeros(2, 2)), r"shape \[2, 2\]"),
            (lambda: other.pull("weihgts").wait(), "no table 'weihgts'"),
            (lambda: other.create("weights", torch.zeros(5), "adam"), r"\[4\] .* \[5\]"),
            (lambda: other.create("weights", torch.zeros(4), "adam", lr=0.5), "lr=0.001.*lr=0.5"),
            (lambda: other.create("half", torch.zeros(4).half()), "float32 or float64"),
            (lambda: other.create("x", torch.zeros(4), "adma"), "no optimizer is registered"),
            (lambda: other.create("x" * 999, torch.zeros(4)), "1 to 200 letters"),
            (lambda: other.push("weights", [1, 2, 3, 4]), "neither a tensor nor"),
        ):
            with pytest.raises(UsageError, match=what):
                wrong()
        assert other.pull("weights").wait().eq(0).all()
        assert set(other.tables()) == {"weights"}


def test_an_error_that_nobody_waited_for_is_raised_by_wait():
    with servers(1) as (address, _), connect(address) as client:
        client.create("w", torch.zeros(3))
        client.push("w", torch.zeros(3), momentum=-1.0)
        client.push("w", torch.ones(3))
        with pytest.raises(UsageError, match="momentum=-1 is out of range"):
            client.wait()
        client.wait()
        assert client.tables()["w"]["version"] == 1


def test_large_tables_are_cut_over_servers_and_small_ones_spread():
    with servers(3) as (address, tables), connect(address) as client:
        for n in range(30):
            client.create(f"small {n}", torch.zeros(10))
        client.create("large", torch.arange(600_001.0))
        assert all(t.num_tables > 1 for t in tables)
        assert sum(t.num_tables for t in tables) == 31
        sizes = [t._tables["large"].values.numel() for t in tables]
        assert sum(sizes) == 600_001
        assert max(sizes) - min(sizes) < 64
        backwards = ",".join(reversed(address.split(",")))
        with connect(backwards) as other:
            other.create("large", torch.arange(600_001.0))
            assert torch.equal(other.pull("large").wait(), torch.arange(600_001.0))
        with connect(address.split(",")[0]) as less, pytest.raises(UsageError, match="more servers"):
            less.pull("large")


def test_empty_and_scalar_tables_are_tables():
    with servers(1) as (address, _), connect(address) as client:
        client.create("none", torch.zeros(0, 5), "adam")
        client.create("one", torch.tensor(1.0), lr=1.0)
        assert client.push_pull("none", torch.zeros(0, 5)).wait().shape == (0, 5)
        assert client.push_pull("one", torch.tensor(3.0)).wait() == -2


def test_connect_says_what_it_needs(monkeypatch, tmp_path):
    for name in ("ECHELON_TOKEN", "ECHELON_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="needs the address"):
        echelon.ps.connect()
    with pytest.raises(UsageError, match="needs the servers' token"):
        echelon.ps.connect("127.0.0.1:1")
    with servers(1) as (address, _):
        with pytest.raises(UsageError, match="named twice"):
            connect(f"{address},{address}")
        with pytest.raises(UsageError, match="names no server"):
            connect(",")
        with pytest.raises(WorldError):
            echelon.ps.connect(address, token="f" * 64)
        file = tmp_path / "token"
        file.touch(0o600)
        file.write_text(TOKEN)
        monkeypatch.setenv("ECHELON_TOKEN_FILE", str(file))
        echelon.ps.connect(address).close()
        monkeypatch.setenv("ECHELON_TOKEN", TOKEN)
        echelon.ps.connect(address.partition("/")[0]).close()


def test_a_client_of_a_server_that_ended_is_told():
    with servers(1) as (address, _):
        client = connect(address)
        client.create("w", torch.zeros(3))
    with pytest.raises(LinkLost, match="the server is ending"):
        client.pull("w").wait()
    client.close()
