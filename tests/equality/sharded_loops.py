"""Loops in the shapes that scripts have, under `sharded`: features, the public face, and lost steps. Writes what each rank found.

sharded_loops.py OUT LEVEL   every check says "fine" or why not.
"""

import dataclasses
import sys
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon import faults
from echelon.parallel.local import full
from echelon.strategy import Strategy
from tests.equality import faces, features, scripts, storms  # noqa: F401  scripts adds to FEATURES
from tests.runs import lost_steps, run_beside

TINY = 0.0002
LOADERS = {"num_workers", "persistent_workers", "iterable_num_workers", "worker_init_fn", "islice_with_persistent_workers",
           "a_dataset_that_worker_init_fn_opens"}  # fmt: skip
"""Features of loaders that start processes: they are the same under every form."""
ONE_UNIT = ("a_layer_used_on_some_workers_only", "two_models_and_a_layer_used_sometimes")
"""Workers run different modules: only where the model is one unit. Not whole models that one worker leaves out: at levels 2 and 3 they are units of
their own, and the alarm for workers in different collectives ends the run (docs/sharded.md)."""
REFUSED = {
    "a_layer_used_on_some_workers_only": "the workers ran different modules",
    "parameters_tied_across_two_models": "another one that was split before",
    "gradients_by_functional_call": "is not the parameter that was split",
    "a_backward_that_raises_everywhere": "has a hook",
    "parameters_read_right_after_each_step": "does not support deepcopy",
    "gradient_penalty_create_graph": "storage of size 0",
    "gradients_by_autograd_grad": "appears to not have been used in the graph",
    "penalties_on_parametrised_weights": "mixed torch.Tensor and DTensor",
    "distillation_with_a_frozen_teacher": "mixed torch.Tensor and DTensor",
    "lbfgs": "LBFGS takes all parameters as one vector",
}
"""At levels 2 and 3: what is said instead."""
LEFT_OUT = {
    "values_written_through_data",  # p.data = other is not seen by DTensors
    "a_worker_without_a_backward",
    "two_models_and_a_layer_used_sometimes",
    "two_experts_of_which_a_worker_uses_one",
}
FACES = [
    n
    for n in faces.CHECKS
    if n
    not in (
        "ema",
        "gradients_by_hand_in_a_group",
        "saves",
        "tracks_and_prepares",
        "weights_equal_at_start_and_streams_differ",
    )
]
"""Those left out compare DTensors with plain tensors in their own words, or what run.build() keeps only a part of (test_built.py)."""
SOME = [
    "feature frozen_unused_tied_called_twice", "feature a_layer_thawed_in_mid_training", "feature sparse_embedding",
    "feature checkpoint_reentrant", "feature checkpoint_not_reentrant", "feature closure", "feature two_losses_two_backwards", "feature gan",
    "feature run_step", "feature run_evaluate", "feature an_lstm", "feature a_replaced_head_with_a_new_optimizer",
    "feature two_optimizers_on_one_model", "one_unit a_layer_used_on_some_workers_only", "refused a_layer_used_on_some_workers_only",
    "refused gradients_by_functional_call", "refused lbfgs", "face clip_norm", "face two_backwards_in_a_group", "face scaled_gradients_in_a_group",
    "storm accumulating", "storm scaler", "storm batchnorm", "storm ema of the strategy", "storm gan",
]  # fmt: skip
STORMS = ["plain", "accumulating", "accumulating by hand", "micro-batches", "amp", "scaler", "batchnorm",
          "ema of the strategy", "gan"]  # fmt: skip


same = faces.same
faces.same = lambda mine, theirs, bound=1e-10: same({k: full(v) for k, v in mine.items()}, theirs, bound)


def strategy(level, fields):
    return Strategy(**{"form": "sharded", "level": level, "wrap_mib": TINY, **fields})


def feature(first, level, name):
    run = run_beside(first, strategy(level, {}))
    mine = {k: full(v) for k, v in features.FEATURES[name](run).items()}
    faces.same(mine, features.FEATURES[name](features.Plain()))


def one_unit(first, level, name):
    run = run_beside(first, strategy(level, {"wrap_mib": 32.0}))
    mine = {k: full(v) for k, v in features.FEATURES[name](run).items()}
    faces.same(mine, features.FEATURES[name](features.Plain()))


def refused(first, level, name):
    run = run_beside(first, strategy(level, {}))
    try:
        features.FEATURES[name](run)
    except Exception as error:
        assert REFUSED[name] in str(error), error  # noqa: PT017
    else:
        raise AssertionError("it was not refused")


def face(first, level, name):
    fields, fn = faces.CHECKS[name]
    fn(run_beside(first, strategy(level, fields)))


def storm(first, level, name):
    chosen, body = storms.LOOPS[name]
    chosen = dataclasses.replace(chosen, form="sharded", level=level, wrap_mib=TINY)
    seen = []
    for stormy in (False, True):
        faults.clear()
        if stormy:
            storms.brew(name)
        run = run_beside(first, chosen)
        weights, ids = body(run)
        seen.append(({k: full(v) for k, v in weights.items()}, ids, lost_steps(run)))
    (calm, calm_ids, none), (other, other_ids, lost) = seen
    assert (none, calm_ids) == (0, other_ids)
    assert lost >= 4
    assert [k for k in calm if not torch.equal(calm[k], other[k])] == []


def refusals(level):
    """Names of features that this level refuses. At level 2 a parameter is whole between forward and backward, so hooks are called."""
    if level == 1:
        return ["lbfgs"]
    return [name for name in REFUSED if level == 3 or name != "a_backward_that_raises_everywhere"]


def checks(level):
    without = {*LOADERS, *refusals(level), *(LEFT_OUT if level > 1 else ())}
    for name in features.FEATURES:
        if name not in without:
            yield feature, name
    for name in refusals(level):
        yield refused, name
    for name in (*ONE_UNIT, *(["two_experts_of_which_a_worker_uses_one"] if level == 1 else [])):
        yield one_unit, name
    for name in FACES if level > 1 else faces.CHECKS:
        yield face, name
    for name in STORMS:
        yield storm, name


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first, level = echelon.init(), int(sys.argv[2])
    chosen = sys.argv[3] if len(sys.argv) > 3 else "all"
    said = {}
    for kind, name in checks(level):
        key = f"{kind.__name__} {name}"
        if chosen != "all" and key not in (SOME if chosen == "some" else chosen.split(",")):
            continue
        try:
            kind(first, level, name)
            said[key] = "fine"
        except Exception:
            said[key] = traceback.format_exc()
            print(key, said[key][-1500:], flush=True)
    torch.save(said, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()
