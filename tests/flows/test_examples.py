"""Every example runs as its first lines say, under plain python and on two workers, and ends with the same weights."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT, environment, leftovers, segments

EXAMPLES = ROOT / "examples"
NAMES = ["house_prices", "images", "language", "gan"]
DIRECT = ["parameter_server"]
"""Those that train without a run."""
VERTICAL = ["vertical"]
"""Those whose data is dealt by columns."""


def plain(folder: Path, name: str, *args: str) -> str:
    """What the example prints under plain python in `folder`."""
    return _run([sys.executable, str(EXAMPLES / f"{name}.py"), *args], folder, {"OMP_NUM_THREADS": "1"})


def spread(folder: Path, name: str, *args: str, workers: int = 2, options: tuple[str, ...] = ()) -> str:
    """What rank 0 of the example prints under `echelon run` in `folder`."""
    launcher = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--run-dir", "run"]
    shown = _run([*launcher, *options, str(EXAMPLES / f"{name}.py"), *args], folder, {})
    assert "warning" not in shown
    return (folder / "run" / "logs" / "worker-0.log").read_text()


def _run(command: list[str], folder: Path, env: dict[str, str], timeout_s: float = 150.0) -> str:
    folder.mkdir()
    before = segments()
    process = subprocess.Popen(command, cwd=folder, env=environment(folder) | env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
    assert process.returncode == 0, f"{command}\n{out}\n{err}"
    assert leftovers(folder, before) == []
    return out


def apart(one: Path, other: Path, name: str) -> float:
    """max |difference| of the weights that two runs saved."""
    a, b = (load_file(folder / f"{name}.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.mark.parametrize("name", NAMES + DIRECT + VERTICAL)
def test_an_example_is_under_80_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


def test_every_example_is_in_the_table_and_here():
    listed = set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    scripts = {file.stem for file in EXAMPLES.glob("*.py")}
    assert listed == {*NAMES, *DIRECT, *VERTICAL} == scripts - {"demo", "demo_train"}


@pytest.mark.case("example house_prices")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_house_prices_draws_the_same_global_gradients_on_two_workers(tmp_path, accumulate):
    args = ("--batch", "2", "--accumulate", str(accumulate), "--epochs", "1")
    alone, two = plain(tmp_path / "1", "house_prices", *args), spread(tmp_path / "2", "house_prices", *args)
    assert alone.strip() == two.strip()
    assert apart(tmp_path / "1", tmp_path / "2", "house_prices") <= 1e-10


@pytest.mark.case("example house_prices")
def test_house_prices_draws_the_numbers_one_gets_by_hand(tmp_path):
    """w = (0.5, 0.25), b = 0.1: y_pred = 3.6, loss = 11.4² = 129.96, and d loss / d w1 = 2 · -11.4 · 6."""
    pictures = _pictures(plain(tmp_path / "1", "house_prices", "--epochs", "1"))
    assert [p[0] for p in pictures] == [
        f"{n}: {what}" for n in (1, 2) for what in ("forward", "loss.backward", "optimizer.step", "optimizer.zero_grad")
    ]  # fmt: skip
    forward, backward, stepped, zeroed, forward2 = (p[1] for p in pictures[:5])
    assert "y_pred 3.60" in forward
    assert "loss 129.96" in forward
    assert _gradients(forward) == ["none"] * 3
    assert _gradients(backward) == _gradients(stepped) == ["-136.80", "-45.60", "-22.80"]
    assert "w1  0.6368" in stepped
    assert "w2  0.2956" in stepped
    assert "b   0.1228" in stepped
    assert _gradients(zeroed) == ["none"] * 3
    assert "y_pred 3.90" in forward2


@pytest.mark.case("example house_prices")
def test_house_prices_with_accumulation_adds_gradients_and_steps_once(tmp_path):
    """The second house is predicted with the first weights; 2 · -8.9 · 5 is added to 2 · -11.4 · 6."""
    pictures = _pictures(plain(tmp_path / "1", "house_prices", "--epochs", "1", "--accumulate", "2"))
    assert [p[0] for p in pictures] == ["1: forward", "1: loss.backward", "2: forward", "2: loss.backward",
                                        "2: optimizer.step", "2: optimizer.zero_grad"]  # fmt: skip
    assert "y_pred 3.10" in pictures[2][1]
    assert _gradients(pictures[3][1]) == ["-225.80", "-81.20", "-40.60"]
    assert "w1  0.7258" in pictures[4][1]


def _pictures(shown: str) -> list[tuple[str, str]]:
    """(title, drawing) of everything that was drawn."""
    pieces = [piece.partition("\n") for piece in shown.strip().split("\n\n")]
    return [(title, drawing) for title, _, drawing in pieces if re.match(r"\d+: ", title)]


def _gradients(drawing: str) -> list[str]:
    return re.findall(r"grad +(\S+)", drawing)


@pytest.mark.slow
@pytest.mark.case("example images")
@pytest.mark.needs("sklearn")
def test_images_ends_with_the_same_weights_on_two_workers(tmp_path):
    args = ("--epochs", "2", "--double")
    alone, two = plain(tmp_path / "1", "images", *args), spread(tmp_path / "2", "images", *args)
    assert alone == two
    assert float(re.findall(r"([\d.]+)% of the unseen", alone)[-1]) > 90
    assert apart(tmp_path / "1", tmp_path / "2", "images") <= 1e-10


@pytest.mark.case("example language")
def test_language_ends_with_the_same_weights_and_writes_the_same_text_on_two_workers(tmp_path):
    args = ("--letters", "40000", "--double")
    alone, two = plain(tmp_path / "1", "language", *args), spread(tmp_path / "2", "language", *args)
    assert alone == two
    assert float(re.findall(r"loss ([\d.]+) after", alone)[0]) < 3.2
    assert len(alone.partition("\n")[2]) > 200
    assert apart(tmp_path / "1", tmp_path / "2", "language") <= 1e-10


@pytest.mark.slow
@pytest.mark.case("example gan")
def test_gan_ends_with_the_same_weights_on_two_workers(tmp_path):
    args = ("--epochs", "3", "--double")
    alone, two = plain(tmp_path / "1", "gan", *args), spread(tmp_path / "2", "gan", *args)
    assert alone == two
    assert 0.7 < float(re.findall(r"centre ([\d.]+) after", alone)[0]) < 1.3
    assert apart(tmp_path / "1", tmp_path / "2", "gan") <= 1e-10


@pytest.mark.case("example vertical")
def test_vertical_ends_with_the_same_weights_where_each_company_reads_its_own_file(tmp_path):
    three = {"workers": 3, "options": ("--strategy", "tensor=3")}
    args = ("--epochs", "2", "--double")
    alone, apiece = (
        plain(tmp_path / "1", "vertical", *args),
        spread(tmp_path / "3", "vertical", *args, **three),
    )
    assert alone == apiece
    assert float(re.findall(r"([\d.]+)% of the unseen", alone)[-1]) > 65
    assert apart(tmp_path / "1", tmp_path / "3", "vertical") <= 1e-12


@pytest.mark.case("example parameter_server")
def test_parameter_server_starts_everything_finds_the_weights_and_leaves_nothing(tmp_path):
    shown = plain(tmp_path / "1", "parameter_server", "--steps", "200")
    found = re.search(r"weights within ([\d.]+) of the true ones after (\d+) updates", shown)
    assert found
    assert float(found[1]) < 0.1
    assert int(found[2]) == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.needs("sklearn")) if n == "images" else n for n in NAMES]
)
def test_an_example_runs_with_its_defaults_on_four_workers(tmp_path, name):
    spread(tmp_path / "4", name, workers=4)
    assert (tmp_path / "4" / f"{name}.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_the_demo_finds_every_way_the_same(tmp_path):
    shown = _run([sys.executable, str(EXAMPLES / "demo.py")], tmp_path / "demo", {}, timeout_s=900)
    table = shown.rpartition("one script, 13 ways")[2]
    assert len(re.findall(r" same *$", table, re.MULTILINE)) == 12
    assert max(map(len, table.splitlines())) <= 80
