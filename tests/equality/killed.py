"""Cells of the equality matrix while servers are killed, one after the other: replicas=1. Started by `echelon run --servers`."""

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
    out, seed, rounds, results = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), {}
    killer = Killer(first.run_dir, seed)
    if first.rank == 0:
        killer.__enter__()
    for turn in range(rounds):
        for form in FORMS:
            for case in zoo.CELLS:
                sparse = case[0] == "table"
                if not sparse:
                    results[turn, form, case] = served.cell(first, form, *case)
    if first.rank == 0:
        killer.__exit__()
    torch.save((results, killer.killed), out / f"rank-{first.rank}.pt")


main()
