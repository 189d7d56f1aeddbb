"""What a step of prepared models is expected to move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon import expected
from echelon.clock import Deadline
from echelon.coding import read
from echelon.comm.threads import Room
from echelon.mesh import moves
from echelon.parallel.allreduce import AllReduceSync
from echelon.parallel.coded import CodedWire
from echelon.parallel.tensor import meet
from echelon.parallel.tensor.meet import Axis
from tests.contract.test_group import together_of


def params(*shapes):
    return [(f"p{i}", nn.Parameter(torch.zeros(shape)), False) for i, shape in enumerate(shapes)]


def test_gradients_that_meet_are_all_reduced_and_frozen_ones_do_not_travel():
    def act(group):
        held = params((256, 256), (256,), (1000,))
        held[2][1].requires_grad_(False)
        sync = AllReduceSync(held, group)
        assert expected._meeting(sync, 1) == moves.all_reduced(4 * (256 * 256 + 256), 3)

    together_of(Room(3).groups(), act)


def test_coded_gradients_are_expected_to_take_a_quarter():
    def act(group):
        sync = AllReduceSync(params((512, 512)), group, wire=CodedWire(group, read("int8")))
        assert expected._meeting(sync, 1) == pytest.approx(moves.all_reduced(4 * 512 * 512, 2) / 4, rel=0.05)

    together_of(Room(2).groups(), act)


def test_rows_of_sparse_tables_and_meetings_that_are_not_known_are_not_predicted():
    def act(group):
        sync = AllReduceSync([("table", nn.Parameter(torch.zeros(10, 4)), True)], group)
        assert expected._meeting(sync, 1) is None
        assert expected._meeting(object(), 1) is None

    together_of(Room(2).groups(), act)


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_through_shared_layers_says_what_it_and_its_backward_will_send(grad):
    """copy and add, gather and cut; where nothing comes back, copies and cuts send nothing."""

    def act(group):
        axis = Axis(group, lambda outcome: None)
        axis.expect(True)
        x = torch.ones(6, 8, requires_grad=grad)
        weight = torch.ones(8, 8, requires_grad=True)
        before = group.sent_bytes
        y = meet.add(meet.copy(x, axis) @ weight, axis)
        y = meet.gather(meet.cut(y, axis, 1, 8), axis, 1, 8)
        y.sum().backward()
        assert axis.expected == group.sent_bytes - before > 0
        axis.expect(False)
        kept = axis.expected
        meet.add(x.detach(), axis)
        assert axis.expected == kept
        group.barrier().wait(Deadline.after(30))

    together_of(Room(2).groups(), act)
