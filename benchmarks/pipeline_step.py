"""Steps under `pipeline=P` beside torch.distributed.pipelining over gloo: the same stages, micro-batches and schedule, in one launch a row.

    python benchmarks/pipeline_step.py                       2 workers, about 7 minutes on 2 cores
    python benchmarks/pipeline_step.py --schedules 1f1b --models heavy --rounds 6 --no-file

`blocks` is 6 transformer layers of width 256 between an embedding and an output layer; `heavy` is wide where it is cut
(`models.bulge`), and computes little for what crosses. Both sides get the whole batch on every rank, cut it at the same modules, and step with plain SGD. Interleaved: 2
stages a worker. Zero-bubble: PyTorch's ScheduleInterleavedZeroBubble with one stage a rank. Ratios are gloo / echelon; goals: 1.0, and 1.2 for
`heavy`. A round took as long as its slowest worker. A row is several launches, and the sides are made in turn in one order and in the other: where
memory comes to lie makes either side some percent faster for a whole launch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import beside

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
GOALS = {"blocks": 1.0, "heavy": 1.2}


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--models", default=",".join(GOALS))
    asked = parser.parse_args()
    worker = str(Path(__file__).with_name("pipeline_step_worker.py"))
    rows = [
        beside.Row(
            f"{schedule} {model}",
            beside.echelon_run(
                asked.workers, f"pipeline={asked.workers},microbatches={asked.micros},schedule={schedule}",
                worker, "FOLDER", model, str(-(-asked.rounds // asked.launches)), "LAUNCH",
            ),
            GOALS[model],
            launches=asked.launches,
        )
        for schedule in asked.schedules.split(",")
        for model in asked.models.split(",")
    ]  # fmt: skip
    results = beside.table(rows)
    beside.leave(
        f"pipeline-step-{asked.workers}workers", results, asked, workers=asked.workers, micros=asked.micros
    )


if __name__ == "__main__":
    main()
