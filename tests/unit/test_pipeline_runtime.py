"""The pipeline's runtime over groups of threads: the same numbers as one process, nothing mixed up, and nobody left waiting."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from echelon.clock import Deadline, FakeClock
from echelon.comm import handover
from echelon.comm.alone import AloneGroup
from echelon.comm.group import Lost
from echelon.comm.threads import Room, ThreadGroup
from echelon.errors import LoopError
from echelon.parallel.pipeline import replicas
from echelon.parallel.pipeline.bubble import measured
from echelon.parallel.pipeline.contract import Action, Port
from echelon.parallel.pipeline.framed import Label, opened, pack
from echelon.parallel.pipeline.pool import Pool
from echelon.parallel.pipeline.runtime import Ran, Runtime
from echelon.parallel.pipeline.schedule import forwards, num_stages
from tests.unit.pipeline_parts import Net, Part, alone, batch, summed, together, workers
from tests.unit.test_over_native import groups as native_groups

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


def same(net, orders, micros, groups, steps=1):
    parts = workers(net, orders, micros)
    outcomes = together(groups, orders, parts, steps)
    assert all(isinstance(o, Ran) for o in outcomes), outcomes
    loss, grads = summed(net, parts)
    expected, wanted = alone(net, micros)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want * steps, rtol=1e-12, atol=1e-14)
    return outcomes


@pytest.mark.case("pipeline: every schedule equals one process")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(schedule, places):
    for micros in (1, 2, 5):
        orders = replicas.orders(schedule, (1,) * places, micros, chunks=2)
        groups = Room(places).groups() if places > 1 else [AloneGroup()]
        same(Net(num_stages(schedule, places, 2)), orders, batch(micros), groups)


@pytest.mark.case("pipeline: every schedule equals one process")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("widths", [(3, 1), (1, 2), (2, 1, 2), (2, 2)])
def test_several_workers_for_a_stage_give_the_same_numbers(schedule, widths):
    for micros, pace in ((1, None), (2, None), (5, None), (7, [[1.0, 3.0, 0.5][:w] for w in widths])):
        orders = replicas.orders(schedule, widths, micros, seconds=pace)
        same(Net(len(widths)), orders, batch(micros), Room(sum(widths)).groups())


@pytest.mark.case("pipeline: values that skip stages")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 1), (1,), (2, 1, 1)])
def test_values_that_skip_stages_whole_numbers_and_empty_tensors_travel(schedule, widths):
    if schedule == "interleaved" and widths == (2, 1, 1):
        return
    stages = num_stages(schedule, len(widths), 3)
    orders = replicas.orders(schedule, widths, 4, chunks=3)
    groups = Room(sum(widths)).groups() if sum(widths) > 1 else [AloneGroup()]
    same(Net(stages, skip=True, odd=True), orders, batch(4), groups)


def test_without_training_only_forwards_are_done_and_losses_are_the_same():
    for schedule, widths in (("1f1b", (1, 1, 1)), ("interleaved", (1, 1, 1)), ("1f1b", (3, 1))):
        orders = forwards(replicas.orders(schedule, widths, 5, chunks=2))
        net, micros = Net(num_stages(schedule, len(widths), 2), skip=True), batch(5)
        parts = workers(net, orders, micros)
        assert all(isinstance(o, Ran) for o in together(Room(sum(widths)).groups(), orders, parts))
        loss = sum(x for mine in parts for part in mine.values() for x in part.losses.values())
        torch.testing.assert_close(loss, alone(net, micros)[0], rtol=1e-12, atol=1e-14)


def test_several_steps_use_the_same_memory_and_give_the_same_numbers():
    orders = replicas.orders("1f1b", (1, 1, 1), 6)
    net, micros = Net(3, skip=True), batch(6)
    parts, groups = workers(net, orders, micros), Room(3).groups()
    runtimes = [Runtime(g) for g in groups]
    sizes = []
    for step in range(4):
        outcomes = _each(runtimes, orders, parts, step)
        assert all(isinstance(o, Ran) for o in outcomes)
        sizes.append([r.pool.num_bytes for r in runtimes])
    assert sizes[-1] == sizes[1], "memory grows"
    for got, want in zip(summed(net, parts)[1], alone(net, micros)[1], strict=True):
        torch.testing.assert_close(got, 4 * want, rtol=1e-12, atol=1e-14)


def _each(runtimes, orders, parts, step):
    outcomes = [None] * len(runtimes)

    def body(rank):
        outcomes[rank] = runtimes[rank].run(orders, parts[rank], step, Deadline.after(30))

    threads = [threading.Thread(target=body, args=(r,)) for r in range(len(runtimes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return outcomes


@pytest.mark.needs("core")
@pytest.mark.case("pipeline: over shared memory")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_shared_memory_with_values_larger_than_its_rings(schedule):
    orders = replicas.orders(schedule, (1, 1, 1), 5, chunks=2)
    rows = handover.RING_BYTES // (64 * 8) + 100
    with native_groups(3) as groups:
        outcomes = same(
            Net(num_stages(schedule, 3, 2), skip=True, odd=True, width=64),
            orders,
            batch(5, rows=rows, width=64),
            groups,
        )
    assert all(0 <= o.bubble < 1 for o in outcomes)


@pytest.mark.needs("core")
@pytest.mark.case("pipeline: over shared memory")
def test_over_shared_memory_with_unequal_stages():
    for widths in ((3, 1), (1, 2)):
        with native_groups(sum(widths)) as groups:
            orders = replicas.orders("1f1b", widths, 5)
            same(Net(2, width=64), orders, batch(5, rows=300, width=64), groups, steps=2)


@pytest.mark.case("pipeline: a lost peer unwinds")
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.needs("core"))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_worker_that_gives_up_in_the_middle_loses_the_step_for_all_at_once(schedule, native):
    orders = replicas.orders(schedule, (1, 1, 1, 1), 6, chunks=2)
    net, micros = Net(num_stages(schedule, 4, 2)), batch(6)
    parts = workers(net, orders, micros)

    def run(groups):
        def act(rank, action):
            if rank == 2 and action.kind == "backward" and action.micro == 1:
                groups[2].abort("enough")
                raise Gone

        began = time.monotonic()
        outcomes = together(groups, orders, parts, act=act)
        assert time.monotonic() - began < 5
        return outcomes

    if native:
        with native_groups(4) as groups:
            outcomes = run(groups)
    else:
        outcomes = run(Room(4).groups())
    assert isinstance(outcomes.pop(2), Gone)
    if isinstance(
        outcomes[-1], Ran
    ):  # the last one may have done and sent all of its own before: the next meeting tells it
        outcomes.pop()
        parts.pop()
    assert all(isinstance(o, Lost) and "enough" in o.reason for o in outcomes), outcomes
    assert all(part.dropped and not part.kept for mine in parts for part in mine.values())


class Gone(Exception):
    pass


@pytest.mark.needs("core")
@pytest.mark.case("pipeline: a lost peer unwinds")
def test_a_killed_process_is_named_to_all_others_within_seconds():
    script = Path(__file__).with_name("pipeline_killed.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 3, done.stderr
    for one in told:
        assert one.pop("seconds") < 5
        assert one.pop("step") in (3, 4)  # who had done all of its own before hears of it in the next step
        assert one == {"lost": True, "peers": [1], "kept": 0}


@pytest.mark.case("pipeline: a lost peer unwinds")
def test_a_worker_that_never_comes_is_lost_at_the_deadline():
    orders = replicas.orders("1f1b", (1, 1), 2)
    parts = workers(Net(2), orders, batch(2))[1]
    runtime = Runtime(Room(2).groups()[1])
    outcome = runtime.run(orders, parts, 0, Deadline.after(0.1))
    assert isinstance(outcome, Lost)
    assert outcome.peers == (0,)
    assert (
        "rank 1 of the pipe waited for value 0 (float64 (2, 6), stage 0 to 1) of micro-batch 0"
        in outcome.reason
    )
    assert runtime.pool.num_bytes == 0, "a buffer that may still be written to is kept"


def test_a_stage_that_raises_is_told_to_the_others_and_raises_here():
    orders = replicas.orders("1f1b", (1, 1, 1), 3)
    parts = workers(Net(3), orders, batch(3))

    def act(rank, action):
        if (rank, action) == (1, Action("forward", 1, 1)):
            raise ValueError("no memory")

    outcomes = together(Room(3).groups(), orders, parts, act=act)
    assert isinstance(outcomes[1], ValueError)
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other, Lost)
        assert (
            "rank 1 of the pipe failed in forward of micro-batch 1 on stage 1: ValueError: no memory"
            in other.reason
        )


@pytest.mark.case("pipeline: a message that is not due is an error with both sides")
def test_ranks_at_different_steps_are_told_what_each_had():
    orders = replicas.orders("1f1b", (1, 1), 1)
    parts, groups = workers(Net(2), orders, batch(1)), Room(2).groups()
    label = Label(8, 0, parts[0][0].gives(0)[0], False)
    other = torch.empty(label.num_bytes, dtype=torch.uint8)
    pack(other, label, torch.zeros(label.port.shape, dtype=torch.float64))
    groups[0].send(other, 1, label.tag)
    with pytest.raises(LoopError) as told:
        Runtime(groups[1]).run(orders, parts[1], 9, Deadline.after(5))
    assert "waits for value 0 (float64 (1, 6), stage 0 to 1) of micro-batch 0 in step 9" in str(told.value)
    assert "rank 0 sent value 0 (float64 (1, 6), stage 0 to 1) of micro-batch 0 in step 8" in str(told.value)
    assert parts[1][1].dropped
    assert isinstance(groups[0].barrier().wait(Deadline.after(1)), Lost), "the others would wait for ever"


@pytest.mark.case("pipeline: a message that is not due is an error with both sides")
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.needs("core"))])
def test_ranks_with_batches_of_different_sizes_lose_the_step_and_are_named(native):
    orders = replicas.orders("1f1b", (1, 1), 1)
    parts = workers(Net(2), orders, batch(1))
    parts[0][0].micros = batch(1, rows=5)
    with native_groups(2) if native else contextlib.nullcontext(Room(2).groups()) as groups:
        outcomes = together(groups, orders, parts)
    assert all(isinstance(o, Lost) for o in outcomes)
    assert "rank 0 sent" in outcomes[1].reason
    assert "rank 1 of the pipe waited for value 0 (float64 (1, 6), stage 0 to 1)" in outcomes[1].reason


PORT = Port(7, 0, 1, (2, 3), torch.float32, True)


@pytest.mark.case("pipeline: a message that is not due is an error with both sides")
@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (Label(1, 0, Port(8, 0, 1, (2, 3), torch.float32, True), False), "sent value 8 "),
        (Label(1, 0, Port(7, 0, 1, (3, 2), torch.float32, True), False), r"float32 \(3, 2\)"),
        (Label(1, 0, Port(7, 0, 1, (6,), torch.float32, True), False), "of 1 dimensions"),
        (Label(1, 0, Port(7, 0, 1, (2, 3), torch.int32, True), False), r"int32 \(2, 3\)"),
        (Label(1, 4, PORT, False), "sent .* micro-batch 4"),
        (Label(1, 0, PORT, True), "sent the gradient of value 7"),
        (None, "no message of a pipeline"),
    ],
)
def test_what_is_not_due_is_named(sent, told):
    buffer = torch.zeros(Label(1, 0, PORT, False).num_bytes, dtype=torch.uint8)
    if sent:
        pack(buffer, sent, torch.zeros(sent.port.shape, dtype=sent.port.dtype))
    with pytest.raises(LoopError, match=told):
        opened(buffer, Label(1, 0, PORT, False), 0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2), (1,) * 12])
def test_every_type_and_shape_comes_as_it_was(dtype, shape):
    label = Label(3, 2, Port(1, 0, 1, shape, dtype, False), False)
    value = torch.ones(shape).to(dtype)
    buffer = torch.empty(label.num_bytes, dtype=torch.uint8)
    pack(buffer, label, value)
    came = opened(buffer, label, 0, 1)
    assert (came.dtype, came.shape) == (value.dtype, value.shape)
    assert torch.equal(came.view(torch.uint8) if came.dim() else came.to(torch.complex64), value.view(torch.uint8) if came.dim() else value.to(torch.complex64))  # fmt: skip


def test_a_stage_that_makes_another_shape_than_recorded_is_told():
    with pytest.raises(
        LoopError, match=r"stage 0 made torch.float32 of shape \(3, 2\) where its record says: value 7"
    ):
        pack(torch.empty(1000, dtype=torch.uint8), Label(0, 0, PORT, False), torch.zeros(3, 2))


def test_memory_is_used_again_only_when_no_tensor_lies_in_it():
    pool = Pool()
    first = pool.take(256)
    at = first.data_ptr()
    weight = torch.nn.Parameter(torch.zeros(16))
    grad = first[128:192].view(torch.float32)
    (weight.view(4, 4) + 0).view(16).backward(grad)
    x = first[128:192].view(torch.float32).detach().requires_grad_()
    kept = (x * x).sum()
    del first, grad, x
    assert pool.take(256).data_ptr() != at, "autograd still needs it"
    kept.backward()
    del kept
    assert (pool.take(256).data_ptr() == at) == (weight.grad.untyped_storage().data_ptr() != at)
    del weight
    assert pool.take(256).data_ptr() == at
    pool.trim()
    pool.trim()
    assert pool.num_bytes == 0


def test_tags_tell_directions_stages_and_micro_batches_apart():
    ports = [Port(1, s, t, (1,), torch.float32, True) for s in range(9) for t in range(s + 1, 10)]
    tags = {Label(0, m, p, back).tag for m in range(50) for p in ports for back in (False, True)}
    assert len(tags) == 50 * len(ports) * 2
    assert max(Label(0, 10**6 - 1, p, True).tag for p in ports) < 2**31


def test_times_of_actions_and_of_waiting_add_up():
    clock = FakeClock()

    class Slow(Part):
        def forward(self, micro, taken):
            clock.advance(1)
            return super().forward(micro, taken)

        def backward(self, micro, grads):
            clock.advance(2)
            return super().backward(micro, grads)

    class Late(ThreadGroup):
        def recv(self, x, peer, tag=0):
            work = super().recv(x, peer, tag)
            inner = work.wait
            work.wait = lambda deadline: (clock.advance(0.25), inner(deadline))[1]
            return work

    orders = replicas.orders("gpipe", (1, 1), 3)
    parts = workers(Net(2), orders, batch(3))
    room = Room(2)
    net, micros = parts[1][1].net, parts[1][1].micros
    other = threading.Thread(
        target=lambda: Runtime(room.groups()[0]).run(orders, parts[0], 0, Deadline.after(30))
    )
    other.start()
    ran = Runtime(Late(room, 1), clock=clock).run(
        orders, {1: Slow(net, 1, micros, False)}, 0, Deadline.after(30)
    )
    other.join(30)
    assert ran.seconds == [(a, 1 if a.kind == "forward" else 2) for a in orders[1]]
    assert (ran.spent("forward"), ran.spent("backward"), ran.per_micro) == (3, 6, 3)
    assert (ran.waited_s, ran.total_s) == (0.75, 9.75)
    assert ran.bubble == 0.75 / 9.75
    assert ran.computed_s == 9
    assert measured([9, 6], total=10) == 0.25
