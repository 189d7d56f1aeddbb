"""Values that come behind the next forward: every reader gets the new ones, only who needs them waits, and the bits are torch's."""

from __future__ import annotations

import copy
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from echelon.comm.group import Lost, Met
from echelon.errors import PeerLost
from echelon.parallel import arriving
from echelon.parallel.arriving import Arriving
from echelon.ps.copies import Copies
from echelon.ps.keys import Tensor as Spec
from echelon.ps.keys import place
from echelon.ps.recipes import Recipe
from echelon.ps.service import Request
from echelon.ps.session import Training
from echelon.ps.spans import GAP_BYTES, cut
from tests.runs import PushMeeting
from tests.unit.test_ps_copies import Site as Copied
from tests.unit.test_ps_session import site

__all__ = ["site"]  # a fixture

SGD = Recipe.from_plain({"name": "sgd", "numbers": {"lr": 0.1, "momentum": 0.9}})
WIDTH = 256


class Gated(Training):
    """Pulls of pieces are answered when the test says so; each is counted by the byte at which it begins."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.open = threading.Event()
        self.open.set()
        self.waiting: list[Request] = []
        self.asked: list[int] = []
        self._guard = threading.Condition()

    def _pull(self, request: Request) -> None:
        spans = request.head.get("spans")
        with self._guard:
            if spans is not None:
                self.asked.append(spans[0][0])
            if not self.open.is_set():
                self.waiting.append(request)
                self._guard.notify_all()
                return
        super()._pull(request)

    def until_waiting(self, count: int) -> None:
        with self._guard:
            assert self._guard.wait_for(lambda: len(self.waiting) >= count, 30)

    def let_go(self, count: int = 1 << 30) -> None:
        with self._guard:
            going, self.waiting = self.waiting[:count], self.waiting[count:]
            if count >= 1 << 30:
                self.open.set()
        for request in going:
            super()._pull(request)


class Trainer:
    """A model that is trained through servers, one step after the other, and its twin in plain torch."""

    def __init__(
        self, ways: Sequence[object], gates: list[Gated], model: nn.Module, replicas: int = 0
    ) -> None:
        self.model, self.twin, self.gates = model, copy.deepcopy(model), gates
        self.meeting = PushMeeting(model, ways, replicas)
        self.optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.1, momentum=0.9)
        self.count = 0

    def batch(self) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.count))

    def loss(self, model: nn.Module) -> Tensor:
        return model(self.batch()).square().mean()

    def step(self, loss: Callable[[nn.Module], Tensor] | None = None) -> object:
        self.count += 1
        loss = loss or self.loss
        self.meeting.begin()
        loss(self.model).backward()
        outcome = self.meeting.commit(self.count)
        if isinstance(outcome, Met):
            outcome = self.meeting.apply(SGD, list(self.model.parameters()))
        for p in self.model.parameters():
            p.grad = None
        self.meeting.withdraw(list(self.model.parameters()))
        if isinstance(outcome, Met):
            self.optimizer.zero_grad()
            loss(self.twin).backward()
            self.optimizer.step()
        return outcome

    @property
    def on_their_way(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if type(p) is Arriving]

    def assert_even(self) -> None:
        for (name, a), b in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.fixture
def trainer(site, monkeypatch) -> Iterator[Callable[..., Trainer]]:
    monkeypatch.setattr(arriving, "WORTH_BYTES", 0)
    monkeypatch.setattr(arriving, "LOCAL", True)
    monkeypatch.setattr(arriving, "_compiled", lambda: False)  # another test of this process may have
    made: list[Trainer] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order on both sides

    def make(model: nn.Module | None = None, servers: int = 1, shared: bool = False) -> Trainer:
        torch.manual_seed(1)
        world = site(1, servers, shared)
        gates = [Gated(1, Copies(index, 1, servers)) for index in range(servers)]
        for gate, host in zip(gates, world.hosts, strict=True):
            host.services["train"] = gate
        made.append(Trainer(world.links[0], gates, model or layers()))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates:
            gate.let_go()
        one.meeting.drain()
    torch.set_num_threads(threads)


def layers(num: int = 4, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num)))


def hold(trained: Trainer) -> None:
    """The values of the next step stay on the servers; those of the last one are here."""
    trained.meeting.drain()
    for gate in trained.gates:
        gate.open.clear()


def release_later(trained: Trainer, seconds: float = 0.05) -> None:
    timer = threading.Timer(seconds, lambda: [gate.let_go() for gate in trained.gates])
    timer.start()


@pytest.mark.case("ps: values arrive behind the next forward")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_weights_are_torchs_bit_for_bit(trainer, servers, shared):
    trained = trainer(servers=servers, shared=shared)
    for number in range(6):
        assert trained.step() == Met()
        hidden = bool(trained.on_their_way)
        assert hidden == (number > 0), (number, trained.meeting.why_not_behind)  # all but the first
    trained.meeting.drain()
    assert trained.on_their_way == []
    trained.assert_even()


@pytest.mark.case("ps: values arrive behind the next forward")
def test_step_returns_before_the_values_are_there_and_a_layer_begins_before_the_last_ones_are(
    trainer, monkeypatch
):
    monkeypatch.setattr(
        "echelon.parallel.arriving.cut", lambda where, order: cut(where, order, WIDTH * WIDTH * 4)
    )
    trained = trainer()
    trained.step()
    trained.step()  # the order is learned behind this one
    trained.step()
    hold(trained)
    assert trained.step() == Met()
    assert len(trained.on_their_way) == 8
    (gate,) = trained.gates
    gate.until_waiting(trained.meeting.num_on_their_way)  # calls are read by the server's own thread
    gate.let_go(2)  # the pieces of the first layer
    first = trained.model[0](trained.batch())
    assert torch.equal(first, trained.twin[0](trained.batch()))
    assert len(trained.on_their_way) == 6
    before, began = trained.meeting.waited_s, time.perf_counter()
    release_later(trained, 0.2)
    out = trained.model(trained.batch())
    assert time.perf_counter() - began > 0.19  # it waited for the others
    assert trained.meeting.waited_s > before  # and that is counted
    assert torch.equal(out, trained.twin(trained.batch()))
    assert trained.on_their_way == []


def test_values_are_asked_for_in_the_order_in_which_the_script_needs_them(trainer, monkeypatch):
    monkeypatch.setattr("echelon.parallel.arriving.cut", lambda where, order: cut(where, order, 1))

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    trained = trainer(Backwards())
    for _ in range(4):
        trained.step()
    assert trained.meeting.order == ["first.weight", "middle.weight", "last.weight"]
    trained.meeting.drain()
    *_, a, b, c = trained.gates[0].asked
    at = trained.meeting.name_at
    assert [at[a], at[b], at[c]] == trained.meeting.order


def _compile(t: Trainer) -> Tensor:
    return torch.compile(t.model, backend="eager")(t.batch())


READERS: dict[str, tuple[Callable[[Trainer], object], Callable[[Trainer], object]]] = {
    name: (read, lambda t, read=read: read(t))
    for name, read in {
        "a forward": lambda t: t.model(t.batch()),
        "state_dict": lambda t: [v.clone() for v in t.model.state_dict().values()],
        "a norm that is printed": lambda t: f"{t.model[0].weight.norm():.9f}",
        "a print": lambda t: repr(t.model[0].weight),
        "deepcopy": lambda t: [p.detach() for p in copy.deepcopy(t.model).parameters()],
        "torch.save": lambda t: _saved(t.model),
        "a penalty": lambda t: sum(p.square().sum() for p in t.model.parameters()),
        "foreach": lambda t: torch.stack(torch._foreach_norm(list(t.model.parameters()))),
        "one vector": lambda t: nn.utils.parameters_to_vector(t.model.parameters()),
        "numpy": lambda t: t.model[1].bias.detach().numpy().tolist(),
        "an item": lambda t: t.model[1].bias[3].item(),
        "data": lambda t: t.model[1].bias.data.clone(),
        "functional_call": lambda t: torch.func.functional_call(
            t.model, dict(t.model.named_parameters()), (t.batch(),)
        ),
        "torch.func.grad": lambda t: list(
            torch.func.grad(lambda p: torch.func.functional_call(t.model, p, (t.batch(),)).sum())(
                dict(t.model.named_parameters())
            ).values()
        ),
        "vmap": lambda t: torch.func.vmap(lambda w: w * 2)(t.model[2].weight),
        "jvp": lambda t: torch.func.jvp(lambda w: w * 2, (t.model[2].weight,), (torch.ones(WIDTH, WIDTH),)),
        "autograd.grad": lambda t: torch.autograd.grad(t.loss(t.model), list(t.model.parameters())),
        "an average of the script's": lambda t: torch.optim.swa_utils.AveragedModel(t.model)(t.batch()),
        "torch.compile": lambda t: _compile(t),
        "another thread": lambda t: _in_a_thread(lambda: t.model(t.batch())),
    }.items()
}


def _saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in found.parameters())
    return [p.detach() for p in found.parameters()]


def _in_a_thread(act: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(30)
    return found[0]


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.case("ps: whoever reads a parameter gets its new values")
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_a_parameter_right_after_a_step_gets_its_new_values(trainer, name):
    read, _ = READERS[name]
    trained = trainer()
    trained.step()
    hold(trained)
    trained.step()
    assert trained.on_their_way
    release_later(trained)
    found = read(trained)
    trained.model, trained.twin = trained.twin, trained.model
    assert same(found, read(trained))


@pytest.mark.case("ps: whoever reads a parameter gets its new values")
def test_what_asks_for_no_numbers_does_not_wait(trainer):
    trained = trainer()
    trained.step()
    hold(trained)
    trained.step()
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    optimizer.zero_grad()
    trained.model.zero_grad()
    trained.model.train()
    trained.model.requires_grad_(True)
    assert sum(p.numel() for p in trained.model.parameters()) == 4 * WIDTH * (WIDTH + 1)
    weight = trained.model[0].weight
    assert (weight.shape, weight.dtype, weight.grad) == ((WIDTH, WIDTH), torch.float32, None)
    assert isinstance(weight, nn.Parameter)
    assert len(trained.on_their_way) == 8


@pytest.mark.case("ps: whoever reads a parameter gets its new values")
def test_what_is_written_after_a_step_is_written_on_its_values(trainer):
    trained = trainer()
    trained.step()
    for _ in range(3):
        hold(trained)
        trained.step()
        release_later(trained, 0.05)
        trained.model[0].weight.data.clamp_(-0.01, 0.01)
        with torch.no_grad():
            trained.model[1].bias.add_(1.0)
        trained.twin[0].weight.data.clamp_(-0.01, 0.01)
        with torch.no_grad():
            trained.twin[1].bias.add_(1.0)
    trained.meeting.drain()
    trained.assert_even()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).relu())


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


def penalised(trained: Trainer) -> Callable[[nn.Module], Tensor]:
    return lambda model: trained.loss(model) + 1e-3 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.case("ps: whoever reads a parameter gets its new values")
@pytest.mark.parametrize("kind", ["tied", "weight_norm", "penalty"])
def test_parameters_read_outside_their_module_are_right(trainer, kind):
    trained = trainer({"tied": Tied, "weight_norm": Normed, "penalty": layers}[kind](), servers=2)
    loss = penalised(trained) if kind == "penalty" else None
    for _ in range(5):
        assert trained.step(loss) == Met()
    trained.meeting.drain()
    trained.assert_even()


@pytest.mark.case("ps: where values cannot be hidden, step() waits")
def test_a_tensor_that_shares_a_parameters_memory_makes_steps_wait(trainer):
    trained = trainer()
    trained.step()
    kept = trained.model.state_dict()  # shares the parameters' memory, as in torch
    trained.step()
    assert trained.on_their_way == []
    assert all(torch.equal(v, p) for v, p in zip(kept.values(), trained.twin.parameters(), strict=True))
    del kept
    trained.step()
    assert trained.on_their_way != []


@pytest.mark.case("ps: where values cannot be hidden, step() waits")
def test_a_traced_module_makes_steps_wait(trainer):
    trained = trainer()
    trained.step()
    trained.step()
    assert trained.on_their_way
    trained.meeting.drain()
    traced = torch.jit.trace(trained.model, trained.batch())
    trained.step()
    assert trained.on_their_way == []
    assert torch.equal(traced(trained.batch()), trained.twin(trained.batch()))


@pytest.mark.case("ps: where values cannot be hidden, step() waits")
def test_other_parameters_and_small_or_near_ones_are_waited_for(trainer, monkeypatch):
    class Own(nn.Parameter):
        pass

    model = layers()
    model[0].bias = Own(torch.zeros(WIDTH))
    trained = trainer(model)
    for _ in range(3):
        trained.step()
        assert trained.on_their_way == []
    assert "`0.bias` is no plain parameter" in trained.meeting.why_not_behind
    assert arriving.worth(0, False) == ""  # the test's setting
    monkeypatch.setattr(arriving, "WORTH_BYTES", 1000)
    monkeypatch.setattr(arriving, "LOCAL", False)
    assert "999 bytes" in arriving.worth(999, False)
    assert "this host" in arriving.worth(1000, True)
    assert arriving.worth(1000, False) == ""


@pytest.mark.case("ps: values that never come lose the next step")
def test_values_that_never_come_raise_nothing_in_the_forward_and_lose_the_step(trainer, site):
    trained = trainer()
    trained.step()
    hold(trained)
    trained.step()
    trained.meeting.cut_off()
    trained.model(trained.batch()).sum().backward()  # nothing is raised here
    assert trained.on_their_way == []
    outcome = trained.meeting.apply(SGD, list(trained.model.parameters()))
    assert isinstance(outcome, Lost)
    with pytest.raises(PeerLost, match="never came"):
        trained.meeting.bring_to_servers()  # what is here must not become the servers'


@pytest.mark.case("ps: values arrive behind the next forward")
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_server_that_dies_with_values_on_their_way_is_replaced_by_its_copy(monkeypatch, shared):
    monkeypatch.setattr(arriving, "WORTH_BYTES", 0)
    monkeypatch.setattr(arriving, "LOCAL", True)
    monkeypatch.setattr(arriving, "_compiled", lambda: False)
    world = Copied(1, 2, shared)
    try:
        trained = Trainer(world.routes[0], [], layers(), replicas=1)
        for dying in (0, 1):
            trained.step()
            trained.step()
            world.until_copied()
            trained.meeting.drain()  # what is held back are the next step's
            held: list[Request] = []
            world.training[dying]._verbs["pull"] = held.append
            assert trained.step() == Met()
            assert trained.on_their_way
            world.end(dying)
            with torch.no_grad():  # a graph that is kept holds parameters
                out = trained.model(trained.batch())
                assert torch.equal(out, trained.twin(trained.batch()))
            assert not trained.meeting.never_came
            world.start(dying)
        trained.step()
        trained.meeting.drain()
        trained.assert_even()
    finally:
        world.close()


@pytest.mark.case("ps: values arrive behind the next forward")
def test_a_new_term_voids_no_pull_of_committed_values(trainer):
    trained = trainer()
    trained.step()
    hold(trained)
    trained.step()
    for gate in trained.gates:
        gate.term = 7  # another worker entered it
    release_later(trained)
    trained.meeting.drain()
    assert not trained.meeting.never_came
    trained.assert_even()


def test_pieces_are_neighbours_and_no_tensor_is_cut():
    specs = [Spec(f"p{i}", numel, 4, "float32") for i, numel in enumerate([100, 16, 400, 16, 16, 3000])]
    placement = place(specs, 2, piece_bytes=1 << 20)
    pieces = cut(placement, [s.name for s in reversed(specs)], piece_bytes=2000)
    assert [piece.names for piece in pieces] == [("p5",), ("p4", "p3", "p2", "p1"), ("p0",)]
    for piece in pieces:
        for index, spans in enumerate(piece.spans):
            ranges = [
                (r.offset_bytes, r.offset_bytes + r.nbytes)
                for name in piece.names
                for r in placement.pieces(name)
                if r.holder.rank == index
            ]
            assert all(any(b <= begin and end <= e for b, e in spans) for begin, end in ranges)
            assert all(b2 - e1 > GAP_BYTES for (_, e1), (b2, _) in itertools.pairwise(spans))
    assert cut(placement, []) == []
