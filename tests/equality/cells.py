"""All cells of the equality matrix at one world size, in one launch. Started by `echelon run`; writes results.pt."""

import sys
from pathlib import Path

import torch

import echelon
from echelon.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.equality import zoo
from tests.runs import committed_samples, note_samples, run_beside


def cell(first, kind, optimizer, accumulate, microbatches):
    strategy = Strategy(accumulate=accumulate, microbatches=microbatches)
    run = run_beside(first, strategy)
    model, dataset = zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    note_samples(loader)
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for x, y in loader:
            loss = zoo.mean_ce(model(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if scheduler:
                scheduler.step()
            opt.zero_grad()
    assert run.global_step == zoo.num_steps(accumulate), run.global_step
    return {k: v.clone() for k, v in model.state_dict().items()}, committed_samples(loader)


def main():
    torch.set_num_threads(1)
    first = echelon.init()
    results = {}
    for case in zoo.CELLS:
        results[case] = cell(first, *case)
    again = {case: cell(first, *case)[0] for case in zoo.CELLS[::9]}
    for case, weights in again.items():
        assert all(torch.equal(v, results[case][0][k]) for k, v in weights.items()), (
            f"{case} twice: other bits"
        )
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


main()
