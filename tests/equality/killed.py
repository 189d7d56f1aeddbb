"""killed.py OUT SEED ROUNDS KILLS: cells of the equality matrix while servers are killed, one after the other: replicas=1. ROUNDS of them, and
more until there were KILLS. Started by `echelon run --servers`."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from tests.equality import served, zoo
from tests.equality.killing import Killer
from tests.runs import run_beside

FORMS = {
    "applied": {"form": "ps", "apply": "server"},
    "bounded": {"form": "ps", "update": "bounded"},
}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    served.make = lambda first, form, **fields: run_beside(first, **FORMS[form], **fields)
    out, (seed, rounds, kills), results = Path(sys.argv[1]), map(int, sys.argv[2:5]), {}
    killer = Killer(first.run_dir, seed)
    if first.rank == 0:
        killer.__enter__()
    for turn in range(4 * rounds):
        if turn >= rounds and first.reduce(float(len(killer.killed)), "max") >= kills:
            break
        for form in FORMS:
            for case in zoo.CELLS:
                sparse = case[0] == "table"
                if not sparse:
                    results[turn, form, case] = served.cell(first, form, *case)
    if first.rank == 0:
        killer.__exit__()
    torch.save((results, killer.killed), out / f"rank-{first.rank}.pt")


main()
