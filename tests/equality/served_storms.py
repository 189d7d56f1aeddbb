"""Storms and stops with parameter servers that run the optimizer: loops that lose steps on purpose, and loops that are stopped and
resumed, beside the same loops undisturbed. The bits must be the same. Started by `echelon run --servers`; writes what differs.

served_storms.py OUT LOOPS_OF_STORMS LOOPS_OF_STOPS    names with commas between them
"""

import dataclasses
import random
import sys
import traceback
import warnings
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from tests.equality import resumed, storms
from tests.equality.resumed import Runs, same, stopped_and_resumed
from tests.runs import finish_saving, lost_steps, values_come_behind

values_come_behind()


def on_servers(strategy):
    return dataclasses.replace(strategy, form="ps", apply="server")


def stormy(runs, name):
    """What differs between the undisturbed loop and the one that loses steps; "" if nothing."""
    strategy, body = storms.LOOPS[name]
    found = []
    for storm in (False, True):
        faults.clear()
        if storm:
            storms.brew(name)
        run = runs.make(on_servers(strategy), f"storm-{name}-{storm}")
        found.append((*body(run), lost_steps(run)))
        finish_saving(run)
    faults.clear()
    (calm, calm_ids, calm_lost), (after, ids, lost) = found
    if (calm_lost, lost >= 4) != (0, True):
        return f"lost {calm_lost} and {lost} steps"
    wrong = [key for key in calm if not torch.equal(calm[key], after[key])]
    return f"other bits in {wrong}" if wrong else "other samples" if calm_ids != ids else ""


def stopped(runs, name, world_size):
    strategy, body = resumed.LOOPS[name]
    strategy = on_servers(strategy)
    run = runs.make(strategy, f"{name}-calm")
    calm = body(run)
    finish_saving(run)
    draw = random.Random(zlib.crc32(name.encode()) + world_size)
    stop_at = 1 + draw.randrange(max(1, run.global_step - 1))
    problem, result = stopped_and_resumed(runs, name, strategy, body, stop_at, 0)
    wrong = [] if problem else [key for key in same(calm, result) if key != resumed.OWN.get(name)]
    return problem or (f"other bits in {wrong} after a stop at step {stop_at}" if wrong else "")


def tried(act):
    try:
        return act()
    except Exception:
        return traceback.format_exc()


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    runs = Runs(first, Path(sys.argv[1]) / "runs")
    said = {}
    for name in filter(None, sys.argv[2].split(",")):
        print("storm", name, flush=True)
        said["storm", name] = tried(lambda name=name: stormy(runs, name))
    for name in filter(None, sys.argv[3].split(",")):
        print("stop", name, flush=True)
        said["stop", name] = tried(lambda name=name: stopped(runs, name, first.world_size))
    torch.save(said, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


main()
