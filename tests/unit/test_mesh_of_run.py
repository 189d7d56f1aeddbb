"""Which ranks stand where in a run of several axes."""

from __future__ import annotations

import pytest

from echelon.errors import StrategyError
from echelon.mesh.axes import laid


def test_neighbours_along_tensor_are_neighbours_in_rank():
    mesh = laid(8, 0, (1, 1), 2)
    assert mesh.sizes == (2, 2, 2)
    assert mesh.group(5, "tensor") == [4, 5]
    assert mesh.replicas(5) == [1, 5]
    assert mesh.pipe(5) == [5, 7]
    assert mesh.model(5) == [4, 5, 6, 7]
    assert [mesh.stage(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_stages_of_unequal_width_are_one_replica_of_the_model():
    mesh = laid(4, 0, (3, 1), 1)
    assert [mesh.stage(rank) for rank in range(4)] == [0, 0, 0, 1]
    assert mesh.replicas(1) == [0, 1, 2]
    assert mesh.replicas(3) == [3]
    assert mesh.pipe(0) == mesh.model(0) == [0, 1, 2, 3]


def test_stages_of_several_workers_each_are_stages():
    mesh = laid(4, 0, (2, 2), 1)
    assert [mesh.stage(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert mesh.replicas(3) == [2, 3]
    assert mesh.pipe(0) == mesh.model(0) == [0, 1, 2, 3]
    assert laid(4, 2, (1, 1), 1) == laid(4, 0, (1, 1), 1)


def test_one_process_is_a_mesh_of_one():
    mesh = laid(1, 0, (1,), 1)
    assert mesh.replicas(0) == mesh.pipe(0) == mesh.model(0) == [0]


@pytest.mark.parametrize(
    ("size", "data", "widths", "tensor", "says"),
    [
        (6, 0, (1, 1), 2, "does not make 6 workers"),
        (8, 3, (1, 1), 2, "--workers 12"),
        (5, 0, (3, 1), 1, "needs 4 workers"),
    ],
)
def test_axes_that_do_not_fit_say_what_would(size, data, widths, tensor, says):
    with pytest.raises(StrategyError) as told:
        laid(size, data, widths, tensor)
    assert says in str(told.value)
