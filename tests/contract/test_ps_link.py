"""Link and Host: one contract, in shared memory and over TCP."""

from __future__ import annotations

import os
import queue
import random
import threading
import time

import pytest
import torch

from echelon.clock import Deadline
from echelon.control.handshake import Identity
from echelon.errors import AuthError, EchelonError, Late, LinkLost, UsageError, WorldError
from echelon.ps.frame import DTYPES, Limits
from echelon.ps.host import Host, Peer, Request
from echelon.ps.link import Link
from tests.conftest import wait_for_threads

TOKEN, RUN = "t" * 64, "run"
WAYS = ["shared memory", "tcp"]


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = soon(timeout_s)
    while not condition():
        assert not deadline.passed
        time.sleep(0.01)


class Desk:
    """A service that does what the verb says."""

    def __init__(self) -> None:
        self.held: list[Request] = []
        self.went: list[Peer] = []
        self.came = threading.Semaphore(0)
        self.left = threading.Semaphore(0)

    def called(self, request: Request) -> None:
        getattr(self, request.verb)(request)

    def gone(self, peer: Peer) -> None:
        self.went.append(peer)
        self.left.release()

    def echo(self, request: Request) -> None:
        request.answer(request.head, request.tensors)

    def add_one(self, request: Request) -> None:
        rooms = request.room()
        for room, x in zip(rooms, request.tensors, strict=True):
            torch.add(x, 1, out=room.view(x.dtype).view(x.shape))
        request.answer({}, [room.view(x.dtype) for room, x in zip(rooms, request.tensors, strict=True)])

    def hold(self, request: Request) -> None:
        self.held.append(request)
        self.came.release()

    def keep(self, request: Request) -> None:
        """Answers with memory of its own, and changes it once that is allowed."""
        x = request.tensors[0].clone()
        changed = threading.Event()

        def sent() -> None:
            x.zero_()
            changed.set()

        request.answer({}, [x], sent)

    def change(self, request: Request) -> None:
        x = request.tensors[0].clone()
        request.answer({}, [x])
        x.zero_()

    def whose(self, request: Request) -> None:
        request.answer({"role": request.peer.role, "rank": request.peer.rank, "room": request.out_bytes})

    def wrong(self, request: Request) -> None:
        raise UsageError("that is wrong", remedy="Do it right.")

    def broken(self, request: Request) -> None:
        raise ZeroDivisionError

    def twice(self, request: Request) -> None:
        request.answer({"n": 1})
        with pytest.raises(UsageError, match="second time"):
            request.answer({"n": 2})


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def host(desk):
    threads = threading.active_count()
    with Host({"desk": desk}, TOKEN, RUN) as made:
        yield made
    wait_for_threads(threads)


@pytest.fixture(params=WAYS)
def link(request, host):
    with connect(host, shared=request.param == "shared memory") as made:
        assert made.local == (request.param == "shared memory")
        yield made


def connect(host: Host, rank: int = 3, **options) -> Link:
    return Link.connect(host.address, TOKEN, Identity(RUN, "worker", rank, 2), soon(), **options)


def ask(link: Link, verb: str, payload=None, out=None, **head):
    return link.call(f"desk.{verb}", head, payload, out).wait(soon())


@pytest.mark.case("ps: one contract for every link")
@pytest.mark.parametrize("numel", [0, 1, 7, 4096, 4097, 100_003, 3_000_000])
def test_tensors_come_back_as_they_went(link, numel):
    x = torch.arange(numel, dtype=torch.float32)
    assert torch.equal(ask(link, "echo", x).tensors[0], x)
    out = torch.empty_like(x)
    assert ask(link, "echo", x, out).tensors == []
    assert torch.equal(out, x)
    ask(link, "add_one", x, out)
    assert torch.equal(out, x + 1)


@pytest.mark.case("ps: one contract for every link")
@pytest.mark.parametrize("name", [name for name, _ in DTYPES])
def test_every_type_travels(link, name):
    dtype = getattr(torch, name)
    for numel in (3, 50_000):
        x = (
            torch.arange(numel * dtype.itemsize, dtype=torch.int64)
            .to(torch.uint8)
            .view(dtype)
            .view(1, numel, 1)
        )
        back = ask(link, "echo", x).tensors[0]
        assert back.dtype == dtype
        assert back.shape == x.shape
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.case("ps: one contract for every link")
def test_several_tensors_are_one_message(link):
    xs = [torch.randn(n) for n in (5, 0, 20_000, 1, 100_000, 33)] + [torch.tensor(7)]
    head = {"a": 1, "b": [None, True, 2.5, "x", b"y"], "c": {"d": -1}}
    reply = ask(link, "echo", xs, **head)
    assert reply.head == head
    assert all(torch.equal(a, b) for a, b in zip(reply.tensors, xs, strict=True))
    outs = [torch.empty_like(x) for x in xs]
    ask(link, "echo", xs, outs)
    assert all(torch.equal(a, b) for a, b in zip(outs, xs, strict=True))


@pytest.mark.case("ps: one contract for every link")
def test_buffers_are_read_and_written_in_place(link):
    x, out = (link.buffer(400_000).view(torch.float32) for _ in range(2))
    assert x.data_ptr() % 64 == out.data_ptr() % 64 == 0
    sent_before = link.num_bytes[1]
    for step in range(3):
        x.fill_(step)
        ask(link, "add_one", x[:70_000], out[1024 : 1024 + 70_000])
        assert out[1024 : 1024 + 70_000].eq(step + 1).all()
    if link.local:
        assert link.num_bytes[1] - sent_before < 2000
    for buffer in (x, out):
        link.release(buffer)


def test_shared_memory_costs_no_descriptors_and_goes_with_its_last_tensor(host):
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    def segments() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:echelon-ps")

    before = segments()
    with connect(host) as link:
        began = fds()
        buffers = [link.buffer(8 << 20) for _ in range(6)]
        ask(link, "whose")
        assert fds() == began
        assert segments() >= before + 2
    kept = buffers[0].fill_(7)
    del buffers
    until(lambda: segments() == before + 1)
    assert kept.eq(7).all()
    del kept
    assert segments() == before


def test_buffers_that_were_released_are_used_again(link):
    first = link.buffer(1 << 20)
    where = first.data_ptr()
    keeps = [link.buffer(n) for n in (1, 64, 65, 3 << 20)]
    link.release(first)
    del first
    if link.local:
        assert link.buffer(1 << 20).data_ptr() == where
    assert len({k.data_ptr() for k in keeps}) == 4


@pytest.mark.case("ps: one contract for every link")
def test_answers_come_in_any_order_and_from_any_thread(link, desk):
    calls = [link.call("desk.hold", {"n": n}, torch.full((9000,), float(n))) for n in range(8)]
    for _ in calls:
        assert desk.came.acquire(timeout=20)
    assert ask(link, "whose").head["rank"] == 3
    assert not any(call.done for call in calls)
    seen = []
    for n, call in enumerate(calls):
        call.then(lambda n=n: seen.append(n))
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    for n in order:
        answering = threading.Thread(
            target=desk.held[n].answer, args=({"n": n}, [desk.held[n].tensors[0] * 2])
        )
        answering.start()
        reply = calls[n].wait(soon())
        answering.join()
        assert reply.head == {"n": n}
        assert reply.tensors[0].eq(2.0 * n).all()
    calls[3].then(lambda: seen.append(-1))
    assert seen == [*order, -1]


@pytest.mark.parametrize("verb", ["keep", "change"])
def test_an_answer_is_whole_whatever_the_server_does_to_its_memory_afterwards(link, verb):
    x = torch.randn(2_000_000)
    out = torch.empty_like(x)
    for _ in range(5):
        ask(link, verb, x, out)
        assert torch.equal(out, x)


def test_many_threads_share_a_link(link):
    wrong = []

    def work(seed: int) -> None:
        for step in range(60):
            x = torch.full((100 + 5000 * (step % 5),), float(seed * 1000 + step))
            out = torch.empty_like(x)
            ask(link, "add_one", x, out)
            if not torch.equal(out, x + 1):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_servers_errors_are_raised_by_name_with_their_remedy(link, capfd):
    with pytest.raises(UsageError, match="that is wrong") as raised:
        ask(link, "wrong")
    assert raised.value.remedy == "Do it right."
    with pytest.raises(EchelonError, match="failed in the server: ZeroDivisionError"):
        ask(link, "broken")
    with pytest.raises(UsageError, match="offers no 'clerk'"):
        link.call("clerk.echo", {}).wait(soon())
    assert ask(link, "twice").head == {"n": 1}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_an_out_of_the_wrong_size_is_told_to_who_gave_it(link):
    for numel in (5, 50_000):
        with pytest.raises(UsageError, match="has room for"):
            ask(link, "echo", torch.zeros(numel), torch.zeros(numel - 1))
    assert ask(link, "whose", out=torch.zeros(3)).head["room"] == 12


def test_what_cannot_travel_is_refused_here(link):
    for x in (torch.zeros(4, 4).t(), torch.zeros(4, device="meta")):
        with pytest.raises(UsageError, match="cannot travel"):
            link.call("desk.echo", {}, x)
    with pytest.raises(UsageError, match="head cannot travel"):
        link.call("desk.echo", {"x": object()})
    assert ask(link, "whose").head["role"] == "worker"


def test_a_late_answer_is_late_and_the_link_goes_on(link, desk):
    call = link.call("desk.hold", {})
    with pytest.raises(Late, match="did not answer in time"):
        call.wait(soon(0.05))
    assert desk.came.acquire(timeout=20)
    desk.held[0].answer({"after": True})
    assert call.wait(soon()).head == {"after": True}


@pytest.mark.case("ps: back-pressure instead of memory growth")
def test_too_many_calls_wait_for_answers(host, desk):
    with connect(host, limits=Limits(in_flight_calls=3)) as link:
        calls = [link.call("desk.hold", {"n": n}) for n in range(3)]
        with pytest.raises(Late, match="3 calls of 0 MiB are unanswered"):
            link.call("desk.hold", {}, deadline=soon(0.1))
        for _ in calls:
            assert desk.came.acquire(timeout=20)
        free = threading.Timer(0.2, desk.held[1].answer)
        free.start()
        began = time.monotonic()
        ask(link, "whose")
        assert time.monotonic() - began > 0.1
        free.join()


@pytest.mark.case("ps: back-pressure instead of memory growth")
def test_too_many_bytes_wait_for_answers(host, desk):
    with connect(host, shared=False, limits=Limits(in_flight_bytes=1 << 20)) as link:
        link.call("desk.hold", {}, torch.zeros(200_000))
        with pytest.raises(Late, match="unanswered"):
            link.call("desk.hold", {}, torch.zeros(200_000), deadline=soon(0.1))
        ask(link, "whose")


@pytest.mark.case("ps: back-pressure instead of memory growth")
@pytest.mark.parametrize("shared", [True, False], ids=WAYS)
def test_a_client_that_sends_more_than_it_may_is_read_later_and_gets_every_answer(desk, shared):
    with Host({"desk": desk}, TOKEN, RUN, limits=Limits(in_flight_calls=2, in_flight_bytes=1000)) as host:
        with connect(host, shared=shared) as link:
            calls = [link.call("desk.echo", {"n": n}, torch.full((n % 300,), float(n))) for n in range(1000)]
            for n, call in enumerate(calls):
                reply = call.wait(soon())
                assert reply.head == {"n": n}
                assert reply.tensors[0].eq(float(n)).all()


def test_an_answer_that_is_strided_comes_whole(link, desk):
    x = torch.randn(300, 200)
    desk.turn = lambda request: request.answer({}, [request.tensors[0].t()])
    assert torch.equal(ask(link, "turn", x).tensors[0], x.t())
    out = torch.empty(200, 300)
    ask(link, "turn", x, out)
    assert torch.equal(out, x.t())
    assert torch.equal(ask(link, "turn", x, out=[]).tensors[0], x.t())


def test_no_host_listens_on_every_interface(desk):
    for every in (".".join("0" * 4), "::"):
        with pytest.raises(UsageError, match="every interface"):
            Host({"desk": desk}, TOKEN, RUN, every)


def test_calls_under_way_are_lost_when_the_server_closes(host, desk, link):
    calls = [link.call("desk.hold", {}, torch.zeros(50_000), torch.zeros(50_000)) for _ in range(3)]
    for _ in calls:
        assert desk.came.acquire(timeout=20)
    host.close(soon(5), reason="enough for today")
    for call in calls:
        with pytest.raises(LinkLost, match="enough for today"):
            call.wait(soon(5))
    with pytest.raises(LinkLost):
        link.call("desk.echo", {})
    with pytest.raises(LinkLost):
        link.buffer(10)
    desk.held[0].answer({"nobody": "hears"})


def test_the_service_hears_once_of_a_client_that_went(host, desk, link):
    ask(link, "whose")
    link.close()
    assert desk.left.acquire(timeout=20)
    assert [(p.role, p.rank, p.incarnation) for p in desk.went] == [("worker", 3, 2)]
    link.close()


def test_a_plain_address_finds_shared_memory_by_itself(host):
    plain = host.address.partition("/")[0]
    with Link.connect(plain, TOKEN, Identity(RUN, "worker", 0), soon()) as link:
        assert link.local
        assert torch.equal(ask(link, "echo", torch.ones(99_999)).tensors[0], torch.ones(99_999))


def test_a_host_without_a_port_serves_its_own_machine(desk):
    with Host({"desk": desk}, TOKEN, RUN, bind="") as host:
        assert host.address.startswith("local/")
        with connect(host) as link:
            assert ask(link, "whose").head["rank"] == 3
        elsewhere = f"local/{'0' * 32}@{'0' * 32}"
        with pytest.raises(AuthError, match="its own host only"):
            Link.connect(elsewhere, TOKEN, Identity(RUN, "worker", 0), soon(5))


@pytest.mark.parametrize("way", WAYS)
def test_nobody_without_the_token_is_let_in(host, desk, way):
    for token, run in (("f" * 64, RUN), (TOKEN, "another")):
        with pytest.raises(AuthError):
            Link.connect(host.address, token, Identity(run, "worker", 0), soon(), shared=way != "tcp")
    until(lambda: host.counters.refused >= 2)
    assert host.counters.calls == 0
    assert desk.went == []


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(WorldError, match=r"127.0.0.1:1 cannot be reached: refused"):
        Link.connect("127.0.0.1:1", TOKEN, Identity(RUN, "worker", 0), soon(0.2))
    with pytest.raises(UsageError, match="not the address"):
        Link.connect("127.0.0.1:1/x@y", TOKEN, Identity(RUN, "worker", 0), soon(0.2))


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_fork_after_a_host_was_closed_touches_nobody_elses_descriptors(desk):
    """Numbers of descriptors are used again: whoever closes one twice closes a stranger's."""
    closed = Host({"desk": desk}, TOKEN, RUN)
    closed.start()
    gone = connect(closed)
    gone.close()
    closed.close(soon(5))
    mine = [os.memfd_create("mine") for _ in range(20)]
    pid = os.fork()
    if not pid:
        try:
            for fd in mine:
                os.fstat(fd)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    for fd in mine:
        os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.case("ps: a forked child has no links")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_keeps_neither_links_nor_host(host, desk, link):
    ask(link, "whose")
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            link.call("desk.whose", {})
        except LinkLost:
            os.write(told, b"y")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"y"
        ask(link, "whose")
        link.close()
        assert desk.left.acquire(timeout=5), "the child's copy of the socket must not keep the connection"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(ready)


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_calls_of_all_sizes_mixes_nothing_up(link, desk, seed):
    """Several threads, buffers and ordinary memory, answers at once and later from another thread."""
    desk.add_one_later = lambda request: later.put(request)
    later: queue.Queue[Request | None] = queue.Queue()
    wrong: list[object] = []

    def answer_later() -> None:
        while (request := later.get()) is not None:
            desk.add_one(request)

    def work(number: int) -> None:
        source = random.Random(seed * 100 + number)
        open_calls = []
        for step in range(80):
            sizes = [source.choice([0, 1, 100, 5000, 20_000, 400_000]) for _ in range(source.randrange(1, 4))]
            shared = source.random() < 0.5
            xs = [place(shared, size).fill_(source.randrange(1000)) for size in sizes]
            outs = [place(source.random() < 0.5, size) for size in sizes]
            verb = source.choice(["add_one", "add_one_later"])
            open_calls.append((xs, outs, link.call(f"desk.{verb}", {}, xs, outs)))
            while len(open_calls) > 4 or (open_calls and step == 79):
                xs, outs, call = open_calls.pop(source.randrange(len(open_calls)))
                call.wait(soon(60))
                if not all(torch.equal(out, x + 1) for x, out in zip(xs, outs, strict=True)):
                    wrong.append((number, step, [x.numel() for x in xs]))
                for x in (*xs, *outs):
                    link.release(x)

    def place(shared: bool, size: int) -> torch.Tensor:
        return link.buffer(size * 4).view(torch.float32) if shared else torch.empty(size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    answering = [threading.Thread(target=answer_later) for _ in range(2)]
    for thread in (*threads, *answering):
        thread.start()
    for thread in threads:
        thread.join()
    for _ in answering:
        later.put(None)
    for thread in answering:
        thread.join()
    assert wrong == []
