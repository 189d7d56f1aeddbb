"""One cell of every form that gives the weights of one process, in one launch: forms.py OUT STRATEGY…, started by `echelon run`.

Worker 0 leaves the whole model of each as `run.save` writes it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from tests import runs
from tests.equality import zoo

WITHOUT_SERVERS = (
    "allreduce", "allreduce,accumulate=2", "allreduce,microbatches=2", "sharded,level=1", "sharded,level=2",
    "sharded,level=3", "tensor=2", "pipeline=2,microbatches=2", "pipeline=2,microbatches=4,schedule=zero-bubble",
)  # fmt: skip
WITH_SERVERS = (
    "ps", "ps,servers_share=1", "ps,accumulate=2", "ps,apply=server", "ps,update=bounded,staleness=0",
)  # fmt: skip


def case(strategy):
    """The cell of the matrix that is trained under it. With update=bounded nobody knows the norm to clip by."""
    return "mlp", "sgd" if "bounded" in strategy else "adamw", 2 if "accumulate=2" in strategy else 1, 1


def train(run, kind, optimizer, accumulate, _):
    model, dataset = zoo.make(kind)
    opt, scheduler, clip = zoo.optimizer_for(optimizer, model, zoo.num_steps(accumulate))
    model, opt, loader = run.prepare(model, opt, zoo.loader_for(dataset))
    if scheduler:
        run.prepare(scheduler)
    for _ in run.epochs(zoo.EPOCHS):
        for batch in loader:
            run.step(zoo.mean_ce, batch, clip_norm=clip)
            if scheduler:
                scheduler.step()
    return model


def main():
    torch.set_num_threads(1)
    out, strategies = Path(sys.argv[1]), sys.argv[2:]
    first = echelon.init()
    for strategy in strategies:
        run = runs.run_beside(first, strategy)
        run.save(out / strategy, train(run, *case(strategy)))


if __name__ == "__main__":
    main()
