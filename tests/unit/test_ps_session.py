"""Training behind a real Host: workers are threads of this process, each with a Link of its own, in shared memory and over TCP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from echelon.clock import Deadline
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, PeerLost, UsageError
from echelon.ps.copies import Copies
from echelon.ps.held import Held
from echelon.ps.host import Host
from echelon.ps.link import Link
from echelon.ps.recipes import Recipe
from echelon.ps.session import NAME, Training
from echelon.ps.worker import Servers
from tests.conftest import wait_for_threads

TOKEN, RUN = "t" * 64, "run"
SGD = {"name": "sgd", "numbers": {"lr": 0.5, "momentum": 0.9}}


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


class Site:
    """Some servers, and workers that are connected to all of them."""

    def __init__(self, workers: int, servers: int, shared: bool) -> None:
        self.training = [Training(workers, Copies(s, workers, servers)) for s in range(servers)]
        self.hosts = [Host({NAME: t}, TOKEN, RUN) for t in self.training]
        for host in self.hosts:
            host.start()
        self.links = [[self.connect(s, rank, shared) for s in range(servers)] for rank in range(workers)]

    def connect(self, server: int, rank: int, shared: bool = True) -> Link:
        identity = Identity(RUN, "worker", rank, 0)
        return Link.connect(self.hosts[server].address, TOKEN, identity, soon(), shared=shared)

    def held(self, params: list[list[tuple[str, torch.Tensor]]], model: int = 1) -> list[Held]:
        """Each worker's view of one model; opened."""
        made = [
            Held(Servers(links, ["h"] * len(links)), model, params[rank], rank)
            for rank, links in enumerate(self.links)
        ]
        self.all(lambda rank: made[rank].open())
        return made

    def all(self, act: Callable[[int], Any]) -> list[Any]:
        """Every worker does it at the same time; what it gave, or the error that it raised."""
        found: list[Any] = [None] * len(self.links)

        def one(rank: int) -> None:
            try:
                found[rank] = act(rank)
            except EchelonError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.links))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a worker waits for an answer that does not come"
        return found

    def ask(self, rank: int, verb: str, payload: Any = None, out: Any = None, **head: Any) -> Any:
        return self.links[rank][0].call(f"{NAME}.{verb}", head, payload, out)

    def close(self) -> None:
        for links in self.links:
            for link in links:
                link.close()
        for host in self.hosts:
            host.close(soon())


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:

        def make(workers: int = 2, servers: int = 1, shared: bool = True) -> Site:
            made = Site(workers, servers, shared)
            stack.callback(made.close)
            return made

        yield make
    wait_for_threads(threads)


WAYS = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])


def parts_of(workers: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=g, dtype=dtype) * 10.0**rank for rank in range(workers)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def opened(made: Site, numel: int = 4, model: int = 1) -> torch.Tensor:
    """Range 0 of a model of one range, on the first server; gives its values."""
    values = torch.arange(numel, dtype=torch.float32)
    ranges = [[0, 0, numel, "float32"]]
    memory = values.view(torch.uint8)

    def open(rank: int) -> None:
        made.ask(rank, "open", [memory] if rank == 0 else [], model=model, ranges=ranges).wait(soon())

    assert made.all(open) == [None] * len(made.links)
    return values


def step(made: Site, rank: int, grad: torch.Tensor, number: int, out: torch.Tensor, **head: Any) -> Any:
    pushed = made.ask(rank, "push", grad, model=1, push=number, keys=[[0]])
    asked = {"model": 1, "number": number, "optimizer": 0, "unused": [], "groups": [[SGD, 1.0, [0]]], **head}
    made.ask(rank, "apply", None, out, **asked).wait(soon())
    pushed.wait(soon())


# -- sums (apply=worker) ----------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.case("ps: sums in the order of ranks")
@pytest.mark.parametrize("numel", [1, 1000, 300_000])
def test_sums_are_taken_in_the_order_of_ranks_whoever_comes_first(site, shared, numel):
    made, parts = site(3, shared=shared), parts_of(3, numel)
    for number, order in enumerate([(0, 1, 2), (2, 0, 1), (1, 2, 0)]):
        outs = {rank: torch.empty(numel) for rank in order}
        calls = [made.ask(r, "sum", parts[r], outs[r], model=1, number=number) for r in order]
        for call in calls:
            call.wait(soon())
        for rank in order:
            assert torch.equal(outs[rank], in_order(parts))


@WAYS
def test_a_sum_may_be_taken_in_place(site, shared):
    made, parts = site(2, shared=shared), parts_of(2, 50_000)
    right = in_order(parts)
    made.all(lambda r: made.ask(r, "sum", parts[r], parts[r], model=1, number=1).wait(soon()))
    assert all(torch.equal(part, right) for part in parts)


def test_parts_of_one_sum_that_differ_are_told_to_all_and_the_server_goes_on(site):
    made = site(2)
    for number, second in enumerate([torch.ones(5), torch.ones(4, dtype=torch.float64)]):
        parts = [torch.ones(4), second]
        errors = made.all(
            lambda r, parts=parts, n=number: made.ask(r, "sum", parts[r], model=1, number=n).wait(soon())
        )
        assert all("parts of one sum differ: worker 0 4 of torch.float32, worker 1" in str(e) for e in errors)
    fine = made.all(lambda r: made.ask(r, "sum", torch.ones(4), model=1, number=9).wait(soon()))
    assert all(torch.equal(reply.tensors[0], torch.full((4,), 2.0)) for reply in fine)


def test_parts_of_types_that_cannot_be_added_are_refused_to_all(site):
    made = site(2)
    strange = [torch.ones(4, dtype=torch.bool).view(torch.uint8).view(torch.bool)] * 2
    made.all(lambda r: made.ask(r, "sum", strange[r], model=1, number=1).wait(soon()))
    empty = made.all(lambda r: made.ask(r, "sum", None, model=1, number=2).wait(soon()))
    assert all(isinstance(e, EchelonError) for e in empty)


# -- steps (apply=server) ---------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.case("ps: a server's step is the sum's step")
def test_a_step_is_the_optimizers_on_the_sum_in_the_order_of_ranks(site, shared):
    made, parts = site(3, shared=shared), parts_of(3, 4)
    weights = opened(made).requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.5, momentum=0.9)
    for number in range(1, 4):
        outs = [torch.empty(4) for _ in range(3)]
        grads = [part * number for part in parts]
        found = made.all(lambda r, n=number, g=grads, o=outs: step(made, r, g[r], n, o[r]))
        assert found == [None] * 3
        weights.grad = in_order(grads)
        optimizer.step()
        assert all(torch.equal(out, weights.detach()) for out in outs)


@WAYS
@pytest.mark.case("ps: a push is provisional")
def test_a_push_that_was_taken_back_does_not_count(site, shared):
    made = site(2, shared=shared)
    values = opened(made)

    def act(rank: int) -> torch.Tensor:
        wrong = made.ask(rank, "push", torch.full((4,), 100.0), model=1, push=1, keys=[[0]])
        made.ask(rank, "back", model=1, pushes=[1]).wait(soon())
        wrong.wait(soon())
        out = torch.empty(4)
        step(made, rank, torch.ones(4), 2, out)
        return out

    for out in made.all(act):
        assert torch.equal(out, values - 0.5 * 2)


def test_what_was_pushed_and_stays_unused_goes_with_the_step(site):
    made = site(2)
    values = opened(made)

    def act(rank: int) -> torch.Tensor:
        pushed = made.ask(rank, "push", torch.ones(4), model=1, push=1, keys=[[0]])
        out = torch.empty(4)
        head = {"model": 1, "number": 1, "optimizer": 0, "unused": [0], "groups": []}
        made.ask(rank, "apply", None, out, **head).wait(soon())
        pushed.wait(soon())
        return out

    assert all(torch.equal(out, values) for out in made.all(act))


@WAYS
@pytest.mark.case("ps: norms are those of the sum")
def test_squares_are_those_of_the_sum_and_tell_of_what_is_not_finite(site, shared):
    made = site(2, shared=shared)
    opened(made)

    def act(rank: int, value: float, number: int) -> dict[str, Any]:
        pushed = made.ask(rank, "push", torch.full((4,), value), model=1, push=number, keys=[[0]])
        found = made.ask(rank, "squares", model=1, number=number, keys=[0]).wait(soon()).head
        made.ask(rank, "back", model=1, pushes=[number]).wait(soon())
        pushed.wait(soon())
        return found

    assert made.all(lambda r: act(r, 1.5, 1)) == [{"squares": [36.0], "finite": True}] * 2
    endless = made.all(lambda r: act(r, float("inf") if r else 1.0, 2))
    assert [(found["finite"], found["whose"]) for found in endless] == [(False, [[1, 0]])] * 2


@pytest.mark.case("ps: what is missing is named")
def test_a_step_without_a_workers_part_names_that_worker_to_all(site):
    made = site(3)
    opened(made)
    asked = {"model": 1, "number": 1, "optimizer": 0, "unused": [], "groups": [[SGD, 1.0, [0]]]}

    def act(rank: int) -> None:
        if rank != 1:
            made.ask(rank, "push", torch.ones(4), model=1, push=1, keys=[[0]])
        made.ask(rank, "apply", None, torch.empty(4), **asked).wait(soon())

    for error in made.all(act):
        assert isinstance(error, UsageError)
        assert "range 0 steps, and worker 1 has pushed nothing for it" in str(error)


@pytest.mark.case("ps: workers that step differently are told")
def test_another_learning_rate_is_told_to_both(site):
    made = site(2)
    values = opened(made)
    other = {"name": "sgd", "numbers": {"lr": 0.25}}

    def act(rank: int) -> None:
        groups = [[other if rank else SGD, 1.0, [0]]]
        step(made, rank, torch.ones(4), 1, torch.empty(4), groups=groups)

    for error in made.all(act):
        assert isinstance(error, UsageError)
        assert "worker 1 steps with another groups than worker 0" in str(error)
        assert "Learning rates" in str(error)
    assert torch.equal(made.training[0].copies.held[0, 1].shard.values[0], values)


def test_a_factor_that_is_not_a_number_is_the_same_on_all_and_steps(site):
    """As in torch: clipping by a norm that is NaN makes the weights NaN."""
    made = site(2)
    opened(made)
    outs = [torch.empty(4), torch.empty(4)]
    groups = [[SGD, float("nan"), [0]]]
    assert made.all(lambda r: step(made, r, torch.ones(4), 1, outs[r], groups=groups)) == [None, None]
    assert all(bool(out.isnan().all()) for out in outs)


@WAYS
@pytest.mark.case("ps: a worker that goes is told to those who wait")
def test_whoever_waits_for_a_worker_that_goes_gets_peer_lost(site, shared):
    made = site(3, shared=shared)
    opened(made)
    waiting = [
        made.ask(0, "sum", torch.ones(4), model=1, number=1),
        made.ask(1, "squares", model=1, number=1, keys=[0]),
    ]
    made.links[2][0].close()
    for call in waiting:
        with pytest.raises(PeerLost, match="worker 2 ended its connection") as raised:
            call.wait(soon())
        assert raised.value.peers == (2,)
    with pytest.raises(PeerLost, match="worker 2"):
        made.ask(0, "sum", torch.ones(4), model=1, number=2).wait(soon())


def test_whoever_waits_for_worker_0_to_open_is_told_that_it_went(site):
    made = site(2)
    early = made.ask(1, "open", model=1, ranges=[[0, 0, 4, "float32"]])
    assert made.ask(
        1, "back", model=1, pushes=[]
    ).wait  # the open is under way; whatever this is answered with
    made.links[0][0].close()
    with pytest.raises(PeerLost, match="worker 0 ended its connection"):
        early.wait(soon())
    with pytest.raises(PeerLost, match="worker 0"):
        made.ask(1, "open", model=2, ranges=[[0, 0, 4, "float32"]]).wait(soon())


def test_workers_with_other_parameters_are_told(site):
    made = site(2)
    ranges = [[[0, 0, 4, "float32"]], [[0, 0, 5, "float32"]]]
    memory = torch.zeros(64, dtype=torch.uint8)
    found = made.all(
        lambda r: made.ask(r, "open", [memory] if r == 0 else [], model=1, ranges=ranges[r]).wait(soon()).head
    )
    assert found[0] == {"updates": 0, "held": False}
    assert "worker 1 has other parameters in model 1 than worker 0" in str(found[1])


# -- what makes no sense ----------------------------------------------------------------------------------------------

WRONG = {
    "another type": (torch.ones(4, dtype=torch.float64), [[0]], "pushed 4 torch.float64 for range 0, which is 4"),
    "too few elements": (torch.ones(3), [[0]], "pushed 3 torch.float32 for range 0, which is 4"),
    "too many elements": (torch.ones(5), [[0]], "5 elements for ranges of 4"),
    "a key that is not there": (torch.ones(4), [[7]], "for range 7, which is not held here"),
    "a key twice": (torch.ones(8), [[0, 0]], "pushed range 0 twice"),
    "a right and a wrong key": (torch.ones(8), [[0, 7]], "for range 7, which is not held here"),
    "more keys than tensors": (torch.ones(4), [[0], [0]], "1 tensors for 2 keys"),
    "keys that are no list": (torch.ones(4), 3, "makes no sense"),
    "keys of lists": (torch.ones(4), [[[0]]], "makes no sense"),
}  # fmt: skip


@pytest.mark.case("ps: garbage of a worker is told to it alone")
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_push_is_told_to_its_worker_and_leaves_nothing(site, what):
    made = site(2)
    values = opened(made)
    grad, keys, said = WRONG[what]
    with pytest.raises(EchelonError, match=said):
        made.ask(1, "push", grad, model=1, push=1, keys=keys).wait(soon())
    outs = [torch.empty(4), torch.empty(4)]
    assert made.all(lambda r: step(made, r, torch.ones(4), 2, outs[r])) == [None, None]
    assert all(torch.equal(out, values - 1.0) for out in outs)


def test_a_second_push_of_a_key_is_refused_and_the_first_counts(site):
    made = site(2)
    values = opened(made)
    first = made.ask(1, "push", torch.ones(4), model=1, push=1, keys=[[0]])
    with pytest.raises(UsageError, match="twice in one step"):
        made.ask(1, "push", torch.ones(4), model=1, push=2, keys=[[0]]).wait(soon())
    asked = {"model": 1, "number": 1, "optimizer": 0, "unused": [], "groups": [[SGD, 1.0, [0]]]}
    calls = [made.ask(0, "push", torch.ones(4), model=1, push=1, keys=[[0]]), first]
    outs = [torch.empty(4), torch.empty(4)]
    calls += [made.ask(rank, "apply", None, outs[rank], **asked) for rank in range(2)]
    for call in calls:
        call.wait(soon())
    assert torch.equal(outs[0], values - 1.0)


GARBAGE: list[Any] = [
    {}, {"model": 1}, {"model": "one"}, {"model": None, "number": 1}, {"model": [1], "number": [1]}, {"model": -1, "number": -1},
    {"model": 1, "push": {}, "keys": [[0]]}, {"model": 1, "push": 1, "keys": [["0"]]}, {"model": 1, "push": 1, "keys": {"0": 1}},
    {"model": 1, "pushes": 7}, {"model": 1, "pushes": [[1]]}, {"model": 1, "pushes": list(range(50_000))},
    {"model": 1, "optimizer": "x", "keys": [0]}, {"model": 1, "optimizer": 0, "keys": 5}, {"model": 1, "optimizer": 0, "keys": [[]]},
    {"model": 1, "optimizer": float("inf"), "keys": [0]}, {"model": float("nan")}, {"model": float("inf"), "ranges": []},
    {"model": 1, "optimizer": 0, "recipes": [[SGD, [0]]], "state": [[0, 3, ["exp_avg"], True]]},
    {"model": 1, "optimizer": 0, "recipes": [[SGD, [0]]], "state": [[99, 3, [], True]]},
    {"model": 1, "optimizer": 0, "recipes": [[{"name": "evil", "numbers": {}}, [0]]], "state": []},
    {"model": 1, "optimizer": 0, "recipes": 3, "state": 4}, {"model": 1, "optimizer": 0, "recipes": [[SGD, [99]]], "state": []},
    {"model": 9, "ranges": [[0, 0, -4, "float32"]]}, {"model": 9, "ranges": [[0, -64, 4, "float32"]]},
    {"model": 9, "ranges": [[0, 0, 1 << 60, "float32"]]}, {"model": 9, "ranges": [[0, 0, 4, "object"]]},
    {"model": 9, "ranges": [[0, 0.5, 4, "float32"]]}, {"model": 9, "ranges": [[0]]}, {"model": 9, "ranges": 4},
    {"model": 9, "ranges": [[[], 0, 4, "float32"]]}, {"model": 9, "ranges": [[0, 0, 4, ["float32"]]]},
]  # fmt: skip


@pytest.mark.case("ps: garbage of a worker is told to it alone")
@pytest.mark.parametrize("verb", ["open", "push", "back", "values", "state", "load", "nonsense"])
def test_garbage_is_answered_and_the_next_step_is_right(site, verb):
    made = site(2)
    values = opened(made)
    payloads = [None, torch.ones(3), [torch.ones(2, dtype=torch.int64)] * 3, torch.ones(0)]
    for head in GARBAGE:
        for payload in payloads:
            # answered, or under way for good where worker 0 or the others are waited for
            with contextlib.suppress(EchelonError):
                for rank in (0, 1) if head.get("model") == 9 else (1,):
                    made.ask(rank, verb, payload, **head).wait(soon(0.05 if verb in ("open", "push") else 30))
    assert torch.equal(made.training[0].copies.held[0, 1].shard.values[0], values)
    outs = [torch.empty(4), torch.empty(4)]
    assert made.all(lambda r: step(made, r, torch.ones(4), 77, outs[r])) == [None, None]
    assert all(torch.equal(out, values - 1.0) for out in outs)


TOGETHER: list[dict[str, Any]] = [
    {"groups": [[SGD, 1.0, [99]]]}, {"groups": [[SGD, 1.0, [[0]]]]}, {"groups": [[SGD, "x", [0]]]}, {"groups": [[SGD, 1.0]]},
    {"groups": 7}, {"groups": [[{"name": "evil", "numbers": {}}, 1.0, [0]]]}, {"optimizer": "x"}, {"optimizer": None},
    {"groups": [[{"name": "sgd", "numbers": {"lr": -1.0}}, 1.0, [0]]]}, {"unused": 7}, {"unused": [[0]]}, {"groups": None},
    {"groups": [[{"name": "sgd", "numbers": {"lr": 10**400}}, 1.0, [0]]]}, {"groups": [[SGD, 10**400, [0]]]},
    {"optimizer": float("inf")},
]  # fmt: skip


@pytest.mark.case("ps: garbage of a worker is told to it alone")
@pytest.mark.parametrize("wrong", TOGETHER, ids=str)
def test_a_step_that_makes_no_sense_is_refused_to_all_who_asked_for_it(site, wrong):
    made = site(2)
    opened(made)
    asked = {"model": 1, "number": 1, "optimizer": 0, "unused": [], "groups": [[SGD, 1.0, [0]]], **wrong}

    def act(rank: int) -> None:
        made.ask(rank, "push", torch.ones(4), model=1, push=1, keys=[[0]])
        made.ask(rank, "apply", None, torch.empty(4), **asked).wait(soon())

    errors = made.all(act)
    assert all(isinstance(error, EchelonError) for error in errors), errors
    assert not any("See its log" in str(error) for error in errors), errors
    outs = [torch.empty(4), torch.empty(4)]
    made.all(lambda r: made.ask(r, "back", model=1, pushes=[1]).wait(soon()))
    assert made.all(lambda r: step(made, r, torch.ones(4), 2, outs[r])) == [None, None]


def test_squares_of_what_is_not_there_are_refused_to_all(site):
    made = site(2)
    opened(made)
    for number, keys in enumerate([[99], [[0]], 7, [0], None]):
        errors = made.all(
            lambda r, n=number, k=keys: made.ask(r, "squares", model=1, number=n, keys=k).wait(soon())
        )
        assert all(isinstance(error, EchelonError) for error in errors), (keys, errors)


def test_a_worker_whose_room_does_not_fit_is_told_and_the_others_get_theirs(site):
    made = site(2)
    values = opened(made)
    outs = [torch.empty(4), torch.empty(3)]
    found = made.all(lambda r: step(made, r, torch.ones(4), 1, outs[r]))
    assert found[0] is None
    assert "has room for" in str(found[1])
    assert torch.equal(outs[0], values - 1.0)


def test_only_workers_of_the_run_are_heard(site):
    made = site(1)
    opened(made)
    client = Link.connect(made.hosts[0].address, TOKEN, Identity(RUN, "cli", 0, 0), soon())
    with pytest.raises(UsageError, match="cli 0 called values, which servers do not offer it"):
        client.call(f"{NAME}.values", {"model": 1}, torch.zeros(16, dtype=torch.uint8)).wait(soon())
    client.close()
    seventh = made.connect(0, 7)
    with pytest.raises(EchelonError, match="no worker 7 of 1"):
        seventh.call(f"{NAME}.push", {"model": 1, "push": 1, "keys": [[0]]}, torch.ones(4)).wait(soon())
    seventh.close()


# -- state ------------------------------------------------------------------------------------------------------------


def tensors(scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    big = torch.randn(300, 200, generator=g, dtype=torch.float64)
    return [("big", big * scale), ("small", torch.randn(7, generator=g, dtype=torch.float64) * scale)]


def train(made: Site, held: list[Held], recipe: Recipe, steps: range, optimizer: int = 0) -> None:
    """The same gradients, whatever the number of servers; each worker pushes half."""
    for number in steps:
        g = torch.Generator().manual_seed(number)
        flat = torch.randn(60_007, generator=g, dtype=torch.float64) / len(held)

        def act(rank: int, flat: torch.Tensor = flat) -> None:
            mine = held[rank]
            pushes = mine.push(flat.clone(), mine.runs(["big", "small"], [0, 60_000]))
            mine.apply(optimizer, [(recipe, 1.0, ["big", "small"])], [])
            for _, _, pending in pushes:
                pending.wait(soon())

        assert made.all(act) == [None] * len(held)


@WAYS
@pytest.mark.case("ps: a server's state loads at any number of servers")
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rmsprop", "adamw"])
def test_state_and_values_go_on_with_another_number_of_servers(site, shared, name):
    recipe = Recipe(name, {"lr": 0.01} | ({"momentum": 0.9} if name in ("sgd", "rmsprop") else {}))
    calm = site(2, 1, shared)
    straight = [tensors(), tensors()]
    train(calm, calm.held(straight), recipe, range(6))
    weights = [tensors(), tensors()]
    for servers, steps in ((3, range(2)), (1, range(2, 4)), (2, range(4, 6))):
        made = site(2, servers, shared)
        held = made.held(weights)
        if steps.start:
            kept = state  # noqa: F821  of the turn before
            made.all(lambda r, h=held, k=kept: h[r].load(0, [(recipe, ["big", "small"])], k))
        train(made, held, recipe, steps)
        state = held[0].state(0, ["big", "small"])
        assert state["big"].keys() == state["small"].keys() != set()
    for rank in range(2):
        for (_, mine), (_, right) in zip(weights[rank], straight[rank], strict=True):
            assert torch.equal(mine, right)


@pytest.mark.case("ps: two optimizers over one range keep states apart")
def test_two_optimizers_over_one_range_keep_their_states_apart(site):
    made = site(1, 2)
    mine = tensors()
    held = made.held([mine])
    theirs = [x.clone().requires_grad_() for _, x in tensors()]
    both = [torch.optim.Adam(theirs, lr=0.01), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)]
    recipes = [Recipe("adam", {"lr": 0.01}), Recipe("sgd", {"lr": 0.1, "momentum": 0.9})]
    for number in range(6):
        train(made, held, recipes[number % 2], range(number, number + 1), optimizer=number % 2)
        g = torch.Generator().manual_seed(number)
        flat = torch.randn(60_007, generator=g, dtype=torch.float64)
        theirs[0].grad, theirs[1].grad = flat[:60_000].view(300, 200), flat[60_000:]
        both[number % 2].step()
    for (_, x), y in zip(mine, theirs, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-13)
    assert held[0].state(0, ["small"])["small"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert held[0].state(1, ["small"])["small"].keys() == {"momentum_buffer"}
    assert held[0].state(2, ["small"]) == {}


def test_state_that_does_not_fit_is_refused_and_the_old_one_stays(site):
    made = site(1)
    held = made.held([tensors()])[0]
    recipe = Recipe("adam", {"lr": 0.01})
    train(made, [held], recipe, range(2))
    before = held.state(0, ["big"])
    wrong = {
        "big": {"step": torch.tensor(3.0), "momentum_buffer": torch.zeros(300, 200, dtype=torch.float64)}
    }
    with pytest.raises(UsageError, match="adam keeps no 'momentum_buffer'"):
        held.load(0, [(recipe, ["big", "small"])], wrong)
    after = held.state(0, ["big"])
    assert all(torch.equal(after["big"][k], x) for k, x in before["big"].items())


def test_what_a_worker_waits_for_can_be_seen(site):
    made = site(3)
    call = made.ask(1, "sum", torch.ones(4), model=1, number=5)
    until = soon()
    while not made.training[0].together.missing:
        assert not until.passed
    assert made.training[0].together.missing == {("sum", 1, 5, 0): [0, 2]}
    made.links[0][0].close()
    with pytest.raises(PeerLost):
        call.wait(soon())
