"""Steps under `sharded` beside plain PyTorch code for the same thing over gloo, in one launch a row.

    python benchmarks/sharded_step.py                       2 workers, about 4 minutes on 2 cores
    python benchmarks/sharded_step.py --workers 4 --levels 3 --models wide-25m

Level 1 beside DDP with ZeroRedundancyOptimizer, levels 2 and 3 beside fully_shard over the same modules; AdamW. Ratios are gloo / echelon,
and ("backend_ratio") fully_shard over our backend of torch.distributed / echelon: what our own carrier and plain-tensor optimizer steps give. A round took as
long as its slowest worker. Goals: 1.0, and 1.2 for models that communicate much.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import beside

MODELS = ("wide-25m", "transformer-25m", "mlp-1m")
HEAVY = ("wide-25m",)


def main() -> None:
    parser = beside.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--wrap-mib", type=float, default=8.0)
    asked = parser.parse_args()
    worker = str(Path(__file__).with_name("sharded_step_worker.py"))
    rows = [
        beside.Row(
            f"level {level} {model}",
            beside.echelon_run(
                asked.workers, f"sharded,level={level},wrap_mib={asked.wrap_mib}",
                worker, "FOLDER", model, level, str(asked.rounds),
            ),
            1.2 if model in HEAVY else 1.0,
        )
        for level in asked.levels.split(",")
        for model in asked.models.split(",")
    ]  # fmt: skip
    results = beside.table(rows)
    beside.leave(
        f"sharded-step-{asked.workers}workers", results, asked, workers=asked.workers, wrap_mib=asked.wrap_mib
    )


if __name__ == "__main__":
    main()
