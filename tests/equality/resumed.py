"""Every loop of features, scripts and storms: undisturbed, and stopped at some step, then resumed in a new run.

The bits must be the same. What a script gathers in lists of its own begins anew in a resumed process: there the end must be
the same. Started by `echelon run`; writes what differs.
"""

import gc
import random
import sys
import traceback
import warnings
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.errors import Preempted
from echelon.strategy import Strategy
from tests.equality import features, scripts, storms  # noqa: F401  scripts adds to FEATURES
from tests.runs import finish_saving, has_arrived, run_beside, stop_at_step

LOOPS = {name: (Strategy(), body) for name, body in features.FEATURES.items()} | {
    f"storm {name}": (strategy, lambda run, body=body: body(run)[0])
    for name, (strategy, body) in storms.LOOPS.items()
}
OWN = {
    "a_peek_inside_the_loop": "count",
    "evaluate_on_the_training_loader_in_mid_epoch": "losses",
    "an_optimizer_over_a_part_with_clipping": "norms",
    "a_peek_draws_from_an_explicit_generator": "peeks",
}
"""What a script counts itself, and so begins anew."""

LEFT_OUT = {
    "values_written_through_data": "acts by enumerate()",
    "parameters_read_right_after_each_step": "what it read, and an average, in variables of its own",
    "gradients_that_nobody_zeroes": "gradients that nobody zeroes live on between steps",
    "an_iterator_that_stays_open": "next() of a loop that is over",
    "an_explicit_generator_and_an_early_break": "leaves the loop by enumerate()",
    "next_without_an_end": "counts its steps with range()",
    "islice_with_persistent_workers": "counts with islice()",
    "an_adaptive_sampler": "a sampler whose state was not given to run.track",
    "a_layer_thawed_in_mid_iteration": "acts by enumerate()",
    "distillation_with_a_frozen_teacher": "an average that was not given to run.track",
    "an_optimizer_over_a_part_with_clipping": "gradients that nobody zeroes live on between steps",
    "a_backward_that_raises_everywhere": "acts by enumerate()",
    "a_scaler_that_skips_an_epochs_last_step": "acts by enumerate()",
    "accumulation_by_hand": "counts with enumerate()",
    "accumulation_by_hand_with_a_rest": "counts with enumerate()",
    "a_step_without_an_optimizer": "never steps",
    "plateau_scheduler_agrees": "sums its metric over an epoch in a variable of its own",
}
"""What a resumed process cannot know: docs/checkpoints.md says so."""


class Runs:
    """Makes runs in the world of this process, each with a folder of its own."""

    def __init__(self, first, folder):
        self.first, self.folder = first, folder

    def make(self, strategy, name, **options):
        return run_beside(self.first, strategy, folder=self.folder / name, **options)


def same(calm, resumed):
    """Names of what differs."""
    wrong = list(calm.keys() ^ resumed.keys())
    for key in calm.keys() & resumed.keys():
        a, b = calm[key], resumed[key]
        if a.dim() and a.shape != b.shape and a.shape[1:] == b.shape[1:] and len(b) < len(a):
            a = a[len(a) - len(b) :]
        if a.shape != b.shape or not torch.equal(a, b):
            wrong.append(key)
    return wrong


def stopped_and_resumed(runs, name, strategy, body, stop_at, tag):
    run = runs.make(strategy, f"{name}-{tag}")
    stop_at_step(run, stop_at)
    try:
        body(run)
    except Preempted:
        finish_saving(run)
    else:
        return "was not stopped", None
    gc.collect()  # a loader's iterator that a later fork inherits would be shut down there
    again = runs.make(strategy, f"{name}-{tag}")
    step = again.resume()
    if step is None or step < stop_at - 1:  # an evaluation, or a second optimizer, may hear of it first
        return f"resumed at {step}, asked to stop at {stop_at}", None
    result = body(again)
    finish_saving(again)
    if not has_arrived(again):
        return "never arrived", None
    return "", result


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else [n for n in LOOPS if n not in LEFT_OUT]
    runs = Runs(first, Path(sys.argv[1]) / "runs")
    said = {}
    for name in chosen:
        strategy, body = LOOPS[name]
        calm_run = runs.make(strategy, f"{name}-calm")
        calm = body(calm_run)
        steps, draw = calm_run.global_step, random.Random(zlib.crc32(name.encode()) + first.world_size)
        said[name] = []
        stops = 2 if first.world_size == 2 else 1
        for tag, stop_at in enumerate(sorted({1 + draw.randrange(max(1, steps - 1)) for _ in range(stops)})):
            try:
                problem, result = stopped_and_resumed(runs, name, strategy, body, stop_at, tag)
                wrong = [] if problem else [k for k in same(calm, result) if k != OWN.get(name)]
                problem = problem or (f"other bits in {wrong}" if wrong else "")
            except Exception:
                problem = traceback.format_exc()
            said[name].append((stop_at, steps, problem))
    torch.save(said, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
