"""A model of `with run.build():` starts with the bits of plain construction under every form that splits it, and trains as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.equality import built

BOUND = 1e-10


@pytest.mark.timeout(240)
@pytest.mark.case("run.build: parts under sharded, tensor and pipeline")
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_are_those_of_plain_construction_and_train_as_one_process(launch, tmp_path, workers):
    done = launch(Path(built.__file__), str(tmp_path), workers=workers, timeout_s=200)
    assert done.code == 0, done.err[-4000:]
    for rank in range(workers):
        said = torch.load(tmp_path / f"rank-{rank}.pt")
        assert tuple(said) == built.CELLS[workers]
        assert {cell: off for cell, off in said.items() if not off <= BOUND} == {}
