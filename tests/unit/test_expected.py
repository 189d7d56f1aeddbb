"""What a step of prepared models is expected to move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.clock import Deadline
from echelon.comm.threads import Room
from echelon.mesh import moves
from echelon.parallel.tensor import meet
from echelon.parallel.tensor.meet import Axis
from tests.contract.test_group import together_of
from tests.runs import Meeting


def params(*shapes):
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)


def test_gradients_that_meet_are_all_reduced_and_frozen_ones_do_not_travel():
    def act(group):
        held = params((256, 256), (256,), (1000,))
        held[2].requires_grad_(False)
        assert Meeting.all_reduced(held, group).expected_bytes == moves.all_reduced(4 * (256 * 256 + 256), 3)

    together_of(Room(3).groups(), act)


def test_coded_gradients_are_expected_to_take_a_quarter():
    def act(group):
        sync = Meeting.all_reduced(params((512, 512)), group, "int8")
        assert sync.expected_bytes == pytest.approx(moves.all_reduced(4 * 512 * 512, 2) / 4, rel=0.05)

    together_of(Room(2).groups(), act)


def test_rows_of_sparse_tables_and_meetings_that_are_not_known_are_not_predicted():
    def act(group):
        assert Meeting.all_reduced(nn.Embedding(10, 4, sparse=True), group).expected_bytes is None
        assert Meeting(object()).expected_bytes is None

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
