"""Same answer with parameter servers: the weights of one process in plain torch, whoever sums and whoever applies."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.equality import features, scripts, zoo  # noqa: F401  scripts adds to FEATURES
from tests.equality.test_equality import BOUND, difference, plain

HERE = Path(__file__).parent
SIZES = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3)]
"""Workers and servers."""

NAMES = list(features.FEATURES)


@pytest.fixture(scope="session")
def served(tmp_path_factory, launch):
    """served(workers, servers) -> what each rank has; a launch is made once. Features run with three workers and two servers."""

    @functools.cache
    def run(workers, servers):
        out = tmp_path_factory.mktemp(f"served-{workers}-{servers}")
        names = ",".join(NAMES) if (workers, servers) == (3, 2) else ""
        options = ("--servers", str(servers), "--strategy", "ps")
        return out, launch(
            HERE / "served.py", str(out), names, workers=workers, options=options, always=True, timeout_s=400
        )

    def results(workers, servers):
        out, result = run(workers, servers)
        assert result.code == 0, result.err[-4000:]
        return [torch.load(out / f"rank-{r}.pt") for r in range(workers)]

    return results


@pytest.mark.timeout(600)
@pytest.mark.case("equality matrix with parameter servers")
@pytest.mark.parametrize("form", ["sums", "some", "applied"])
@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_the_matrix_with_servers(served, workers, servers, form):
    for results in served(workers, servers):
        cells = {
            case: found for (kind, case), found in results.items() if kind == form and isinstance(case, tuple)
        }
        assert len(cells) >= 8
        for case, weights in cells.items():
            sparse = form == "applied" and isinstance(weights, str) and "sparse gradients" in weights
            assert sparse == (form == "applied" and case[0] == "table"), (case, weights)
            if not sparse:
                assert not isinstance(weights, str), f"{case}: {weights}"
                assert difference(weights, plain(case)) <= BOUND, case
