"""Loss against time for each way in which updates meet: even workers, one always slow, a random one slow in each step.

    python benchmarks/stragglers.py [--seeds 5] [--epochs 4] [--cost-ms 3.5] [--svg docs/stragglers.svg]

Four workers and one server; a worker's samples cost sleep, so two cores are enough. Ratios are sync's time / the policy's to the
same loss: what sync reaches with even workers after three quarters of its steps. Asked for: with one of four always three times as slow,
`backup=1` and `async` 1.8; with a random one, `bounded,staleness=4` 1.5. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import record

LIMIT_S = 1500.0
GOALS = {("always", "backup=1"): 1.8, ("always", "async"): 1.8, ("random", "bounded, staleness 4"): 1.5}
COLOURS = {
    "sync": "#0072b2",
    "backup=1": "#d55e00",
    "bounded, staleness 4": "#009e73",
    "async": "#cc79a7",
}
TITLES = {
    "even": "even workers",
    "always": "one of four always 3 × slow",
    "random": "a random one 3 × slow in each step",
}

Curve = list[list[float]]


def measure(workers: int, seeds: int, epochs: int, cost_ms: float) -> dict[str, dict[str, dict[str, Curve]]]:
    worker = Path(__file__).with_name("stragglers_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curves.json"
        command = [sys.executable, "-m", "echelon", "run", "--workers", str(workers), "--servers", "1", "--strategy", "ps",
                   "--run-dir", f"{folder}/run", str(worker), str(seeds), str(epochs), str(cost_ms), str(out)]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(record.ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode or not out.exists():
            sys.exit(f"the run failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, dict[str, dict[str, Curve]]] = json.loads(out.read_text())
    return found


def time_to(curve: Curve, loss: float) -> float | None:
    """Seconds until the loss was first reached."""
    return next((seconds for seconds, found in curve if found <= loss), None)


def target(even: Curve) -> float:
    """What sync with even workers reached after three quarters of its steps."""
    return even[3 * len(even) // 4][1]


def judge(curves: dict[str, dict[str, dict[str, Curve]]]) -> dict[str, dict[str, Any]]:
    """By condition and policy: seconds to the target, and sync's / these, of each seed."""
    found: dict[str, dict[str, Any]] = {}
    for condition in TITLES:
        for policy in COLOURS:
            times, ratios = [], []
            for of_seed in curves.values():
                goal = target(of_seed["even"]["sync"])
                sync, mine = (time_to(of_seed[condition][name], goal) for name in ("sync", policy))
                times.append(mine)
                ratios.append(sync / mine if sync and mine else 0.0)
            asked = GOALS.get((condition, policy))
            found.setdefault(condition, {})[policy] = {
                "seconds": times, "ratios": ratios, "median": statistics.median(ratios), "least": min(ratios),
                **({"goal": asked, "met": statistics.median(ratios) >= asked} if asked else {}),
            }  # fmt: skip
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| | " + " | ".join(COLOURS) + " |", "|---" * (len(COLOURS) + 1) + "|"]
    for condition, title in TITLES.items():
        cells = []
        for policy in COLOURS:
            one = found[condition][policy]
            reached = [s for s in one["seconds"] if s is not None]
            seconds = f"{statistics.median(reached):.1f} s" if reached else "not reached"
            cells.append(f"{seconds}, {one['median']:.1f} × ({one['least']:.1f}–{max(one['ratios']):.1f})")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def svg(curves: dict[str, dict[str, Curve]]) -> str:
    """One seed's curves, a panel a condition, over the same time."""
    width, height, left, top, wide, high = 960, 330, 50, 50, 270, 220
    every = [point for of in curves.values() for curve in of.values() for point in curve]
    longest, highest = max(t for t, _ in every), max(loss for _, loss in every)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, (condition, title) in enumerate(TITLES.items()):
        x0, y0 = left + panel * (wide + 30), top + high
        parts.append(f'<text x="{x0}" y="{top - 14}" font-size="14">{escape(title)}</text>')
        parts.append(
            f'<path d="M{x0} {top} V{y0} H{x0 + wide}" fill="none" stroke="#888"/>'
            f'<text x="{x0 + wide}" y="{y0 + 16}" text-anchor="end">{longest:.0f} s</text>'
        )
        for policy, curve in curves[condition].items():
            points = " ".join(
                f"{x0 + wide * t / longest:.1f},{y0 - high * loss / highest:.1f}" for t, loss in curve
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width="1.5"/>'
            )
    parts.append(f'<text x="6" y="{top + 10}">{highest:.1f}</text><text x="6" y="{top + high}">loss 0</text>')
    for number, (policy, colour) in enumerate(COLOURS.items()):
        at = left + 180 * number
        parts.append(f'<rect x="{at}" y="{height - 28}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 18}" y="{height - 18}">{escape(policy)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cost-ms", type=float, default=3.5, help="sleep for each sample")
    parser.add_argument("--svg", type=Path, help="draw the first seed's curves into this file")
    parser.add_argument("--no-file", action="store_true", help="leave nothing in benchmarks/results")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    curves = measure(asked.workers, asked.seeds, asked.epochs, asked.cost_ms)
    found = judge(curves)
    print("\n".join(table(found)))
    for condition, policies in found.items():
        for policy, one in policies.items():
            if "goal" in one:
                print(
                    f"{policy}, {TITLES[condition]}: {one['median']:.2f} × (asked {one['goal']}): {'met' if one['met'] else 'NOT met'}"
                )
    if asked.svg:
        asked.svg.write_text(svg(curves["0"]))
    if not asked.no_file:
        facts = {"workers": asked.workers, "seeds": asked.seeds, "epochs": asked.epochs, "cost_ms": asked.cost_ms, "load": load}  # fmt: skip
        path = record.write("stragglers-4workers", found, **facts)
        print(f"written to {path.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
