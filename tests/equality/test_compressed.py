"""compress: the loss goes where it went without, lost and resumed steps change no bit, nothing owed is lost on the way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.equality import compressed, features, scripts  # noqa: F401  scripts adds to FEATURES
from tests.equality.test_equality import difference, plain_feature

SCRIPT = Path(__file__).parent / "compressed.py"


@pytest.fixture(scope="session")
def found(launched_once):
    """found(workers, mode, source) -> (folder, what each rank found)"""

    def run(workers: int, mode: str, source: Path | None = None):
        said = launched_once("compressed.py", mode, *([str(source)] if source else []), workers=workers)
        return said.out, said.ranks

    return run


@pytest.mark.case("compress: converges")
@pytest.mark.parametrize("text", compressed.CODECS[1:])
def test_three_workers_learn_as_without(found, text):
    _, ranks = found(3, "train")
    none, mine = ranks[0]["trained"]["none"], ranks[0]["trained"][text]
    assert none["after"] < 0.1 * none["before"]
    assert abs(mine["after"] - none["after"]) < 0.02 * none["before"], (mine["after"], none["after"])
    for other in ranks[1:]:
        weights = zip(mine["weights"], other["trained"][text]["weights"], strict=True)
        assert all(torch.equal(a, b) for a, b in weights)
    if text in ("fp16", "bf16", "int8"):
        assert mine["forms"] == ["scatter"]


@pytest.mark.case("compress: a lost step changes no bit")
@pytest.mark.case("compress: resumed with the same bits")
@pytest.mark.parametrize("name", compressed.SCATTERED)
def test_coded_sums_follow_the_step(found, name):
    _, ranks = found(3, "train")
    for said in ranks:
        forms, after_losses, after_resume = said["scattered"][name]
        assert forms == {"scatter"}
        assert after_losses == []
        assert after_resume == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("compress: every loop that works without it")
def test_every_feature_works_compressed(tmp_path, launch):
    """fp16 errs by 2e-4; in-batch negatives amplify that, also in one process."""
    names = list(features.FEATURES)
    result = launch(
        SCRIPT.parent / "features.py", str(tmp_path), ",".join(names), "fp16", workers=3, timeout_s=500
    )
    assert result.code == 0, result.err[-3000:]
    for rank in range(3):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        gaps = {name: difference(found[name], plain_feature(name)) for name in names}
        assert gaps.pop("run_gather_in_batch_negatives") < 0.2
        assert {name: gap for name, gap in gaps.items() if not gap < 2e-3} == {}


@pytest.mark.case("compress: at another number of workers")
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_at_another_number_of_workers_as_much_is_owed(found, workers):
    folder, saved = found(3, "save")
    _, loaded = found(workers, "load", folder)
    total = [
        torch.cat([sum(r["owed"][n] for r in ranks).double() for n in saved[0]["owed"]])
        for ranks in (saved, loaded)
    ]
    assert float(total[0].abs().max()) > 1e-3
    assert float((total[0] - total[1]).abs().max()) <= 1e-6 * float(total[0].abs().max())
    for said in loaded:
        assert said["step"] == compressed.STOP
        assert math.isfinite(said["after"])


@pytest.mark.case("compress: at another number of workers")
def test_one_worker_has_nobody_to_owe_to_and_says_so(found):
    folder, _ = found(3, "save")
    _, (alone,) = found(1, "load", folder)
    assert any("it is dropped" in message for message in alone["warned"])
