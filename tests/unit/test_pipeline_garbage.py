"""Garbage inside of a pipeline's messages: the sender is named, nobody waits for ever, and no memory is taken for it."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from echelon.clock import Deadline
from echelon.comm.group import Lost
from echelon.comm.threads import Room
from echelon.errors import LoopError
from echelon.parallel.pipeline import replicas
from echelon.parallel.pipeline.contract import Port
from echelon.parallel.pipeline.framed import Label, opened, pack
from echelon.parallel.pipeline.runtime import Runtime
from tests.unit.pipeline_parts import Net, batch, workers
from tests.unit.test_over_native import groups as native_groups

SEED = 20261116
LABEL = Label(5, 1, Port(7, 0, 1, (2, 3), torch.float32, True), False)
HEADER = 8 * len(LABEL.words)


def message(label):
    buffer = torch.zeros(label.num_bytes, dtype=torch.uint8)
    pack(buffer, label, torch.ones(label.port.shape, dtype=label.port.dtype))
    return buffer


@pytest.mark.case("pipeline: garbage in messages")
def test_a_header_with_any_bit_wrong_is_refused_with_its_sender():
    dice = random.Random(SEED)
    for trial in range(400):
        buffer = message(LABEL)
        if trial % 2:
            buffer[:HEADER] = torch.tensor(list(dice.randbytes(HEADER)), dtype=torch.uint8)
            if trial % 4 == 1:
                buffer[:8] = message(LABEL)[:8]  # as if it were one of ours
        else:
            for _ in range(dice.randint(1, 4)):
                at = dice.randrange(HEADER)
                buffer[at] = (int(buffer[at]) + dice.randint(1, 63)) % 256
        with pytest.raises(LoopError, match="rank 3 sent ") as told:
            opened(buffer, LABEL, 3, 0)
        assert len(str(told.value)) < 2000


@pytest.mark.case("pipeline: garbage in messages")
@pytest.mark.parametrize(
    ("native", "trials"), [(False, 60), pytest.param(True, 6, marks=pytest.mark.needs("core"))]
)
def test_what_a_broken_worker_sends_ends_the_step_and_names_it(native, trials):
    dice = random.Random(SEED)
    for trial in range(trials):
        orders = replicas.orders("1f1b", (1, 1), 1)
        parts = workers(Net(2), orders, batch(1))
        due = Label(9, 0, parts[0][0].gives(0)[0], False)
        length = dice.choice([0, 1, 7, 8, due.num_bytes - 1, due.num_bytes, due.num_bytes + 1, 1 << 20])
        garbage = torch.tensor(list(dice.randbytes(min(length, 4096))), dtype=torch.uint8)
        garbage = torch.cat([garbage, torch.zeros(length - len(garbage), dtype=torch.uint8)])
        with native_groups(2) if native else contextlib.nullcontext(Room(2).groups()) as groups:
            groups[0].send(garbage, 1, due.tag)
            runtime = Runtime(groups[1])
            try:
                outcome = runtime.run(orders, parts[1], 9, Deadline.after(20))
            except LoopError as error:
                said = str(error)
            else:
                assert isinstance(outcome, Lost), f"seed {SEED}, trial {trial}: {length} bytes were taken"
                said = outcome.reason
                assert "the deadline" not in said, f"seed {SEED}, trial {trial}: it waited to the end"
            assert "rank 0 sent" in said, f"seed {SEED}, trial {trial}: {said}"
            assert parts[1][1].dropped
            assert runtime.pool.num_bytes == 0, "its memory may still be written to"
            assert isinstance(groups[0].barrier().wait(Deadline.after(5)), Lost), (
                "the others would wait for ever"
            )
