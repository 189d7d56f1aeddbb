"""Golden hashes: every cell is trained, and its end compared with golden.json. make golden; docs/exact.md."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from echelon import native
from echelon.checkpoint.load import latest
from tests.checkpoint_ranks import read
from tests.exact import check, machine
from tests.exact.book import Book, Values
from tests.exact.cells import LAUNCHES, SCRIPTS, Launch, Script
from tests.exact.fingerprint import fingerprint
from tests.exact.launch import HERE, launch, options

FILE = HERE / "golden.json"
PASSED_ON = ("ECHELON_START", "ECHELON_MALLOC")
"""How processes start and where their memory comes from changes no bit: all ways can be tried."""


def find() -> Values:
    """Of every launch and cell: the hash of the weights and that of the optimizer's state."""
    if native.core() is None:
        raise SystemExit("golden hashes are those of the compiled core: make native")
    found: dict[str, Values] = {}
    with tempfile.TemporaryDirectory(prefix="echelon-golden-") as folder:
        for name, what in (LAUNCHES | SCRIPTS).items():
            began, place = time.monotonic(), Path(folder, name)
            place.mkdir()
            found[name] = of_script(what, place) if isinstance(what, Script) else of_launch(name, what, place)
            print(f"  {name}: {len(found[name])} in {time.monotonic() - began:.1f} s", flush=True)
    return found


def of_launch(name: str, cells: Launch, place: Path) -> Values:
    served = options(cells.workers, cells.servers, "ps" if cells.servers else "")
    plain = cells.workers == 1 and not cells.servers
    launch(() if plain else served, "train.py", [str(place), name], place, passed_on=PASSED_ON)
    return {cell.name: of_checkpoint(place / cell.name / "checkpoints") for cell in cells.cells}


def of_script(script: Script, place: Path) -> Values:
    for more, code in script.lives:
        how = (*options(script.workers, script.servers, script.strategy), *more)
        launch(how, "script.py", [script.fault], place, code, PASSED_ON)
    return {script.name: of_checkpoint(place / "runs" / "latest" / "checkpoints")}


def of_checkpoint(folder: Path) -> dict[str, str]:
    """Of the last checkpoint there: whole tensors under the names of the script, however many workers saved them under what strategy."""
    saved, problems = latest(folder)
    if saved is None:
        raise SystemExit(f"no checkpoint in {folder}: {problems}")
    weights, state = {}, {}
    for key in saved.keys():  # noqa: SIM118
        part = weights if key.slot in ("value", "ema") else state
        part[f"{key.name} {key.slot}"] = read(saved, key.name, key.slot)
    groups = [optimizer["groups"] for optimizer in saved.objects(0)["optimizers"]]
    return {"weights": fingerprint(weights), "optimizer": fingerprint([state, groups])}


if __name__ == "__main__":
    sys.exit(check.main(Book(FILE), machine.of_bits(), find, "tests.exact.golden", sys.argv[1:]))
