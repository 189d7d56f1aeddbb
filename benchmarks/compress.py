"""Loss against wall time over a slow link, for every codec and none.

    python benchmarks/compress.py [--seeds 5] [--seconds 30] [--mbit 100] [--only none,int8]

Two hosts (network namespaces, so it needs root) on a link of that rate, a worker on each; a multi-layer perceptron of a million
parameters learns a random teacher. Codecs take turns within each seed. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import needs
from tests.flows.netns import Network, sh

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "compress_worker.py"
CODECS = ["none", "fp16", "bf16", "int8", "1bit", "topk:0.01", "powersgd:4"]


def shape(net: Network, mbit: int) -> None:
    """The rate of every link, in both directions."""
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
    for number, host in enumerate(net.hosts):
        sh("tc", "-n", host.space, "qdisc", "add", "dev", "eth0", *limit)
        sh("tc", "-n", net.switch, "qdisc", "add", "dev", f"p{number}", *limit)


def once(net: Network, text: str, seconds: float, seed: int) -> dict[str, object]:
    """One run over both hosts."""
    with tempfile.TemporaryDirectory() as folder:
        out, address = Path(folder) / "curve.json", f"{net.hosts[0].ipv4}:29400"
        env = os.environ | {
            "PYTHONPATH": str(ROOT), "ECHELON_TOKEN": secrets.token_hex(32), "ECHELON_RUNS": f"{folder}/runs",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        first = ["run", "--hosts", "2", "--listen", address, "--workers", "2", "--name", "it", "--set",
                 f"compress={text}", str(WORKER), str(out), str(seconds), str(seed)]  # fmt: skip
        commands = [first, ["join", address]]
        running = [
            subprocess.Popen(
                host.command(sys.executable, "-m", "echelon", *words),
                cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for host, words in zip(net.hosts, commands, strict=True)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=seconds + 240)[0] for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if not out.exists():
            raise RuntimeError(f"compress={text} failed:\n{said[0][-2000:]}")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def loss_at(curve: list[list[float]], when_s: float) -> float:
    """The last loss noted by then."""
    return [loss for spent_s, _, loss in curve if spent_s <= when_s][-1]


def reached_s(curve: list[list[float]], loss: float) -> float | None:
    return next((spent_s for spent_s, _, value in curve if value <= loss), None)


def judged(runs: dict[str, list[dict]], seconds: float) -> dict[str, dict[str, object]]:
    """Medians over seeds: loss at some times, steps a second, and when the loss was reached that `none` ends with."""
    found: dict[str, dict[str, object]] = {}
    for text, each in runs.items():
        curves = [run["curve"] for run in each]
        found[text] = {
            "steps_per_s": round(statistics.median(c[-1][1] / c[-1][0] for c in curves), 2),
            "kb_sent_a_step": round(
                statistics.median(r["sent_bytes"] / r["curve"][-1][1] for r in each) / 1e3, 1
            ),
            "ratio": round(statistics.median(r["plain_bytes"] / r["sent_bytes"] for r in each), 2),
            "loss_at": {
                f"{share * seconds:g} s": round(
                    statistics.median(loss_at(c, share * seconds) for c in curves), 4
                )
                for share in (0.25, 0.5, 1.0)
            },
        }
        if "none" in runs:
            ends = [run["curve"][-1][2] for run in runs["none"]]
            times = [reached_s(c, end) for c, end in zip(curves, ends, strict=True)]
            met = [t for t in times if t is not None]
            found[text]["reaches_the_end_of_none_s"] = (
                round(statistics.median(met), 2) if len(met) == len(times) else None
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--only", default=",".join(CODECS))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if reason := needs.why_not("hosts"):
        sys.exit(reason)
    runs: dict[str, list[dict]] = {text: [] for text in options.only.split(",")}
    net = Network(2)
    try:
        shape(net, options.mbit)
        for seed in range(options.seeds):
            for text in runs:
                runs[text].append(once(net, text, options.seconds, seed))
                spent_s, step, loss = runs[text][-1]["curve"][-1]
                print(
                    f"seed {seed}  {text:12} {step:5.0f} steps in {spent_s:.1f} s, held-out loss {loss:.4f}",
                    flush=True,
                )
    finally:
        net.close()
    table = judged(runs, options.seconds)
    for text, row in table.items():
        print(f"{text:12} {row}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    result = {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "link_mbit": options.mbit,
        "workers": 2,
        "seconds": options.seconds,
        "seeds": options.seeds,
        "params": next(iter(runs.values()))[0]["params"],
        "results": table,
        "curves": {text: [run["curve"] for run in each] for text, each in runs.items()},
    }
    name = f"{datetime.now():%Y-%m-%d}-compress-{os.cpu_count()}cores.json"
    path = Path(options.out) if options.out else ROOT / "benchmarks" / "results" / name
    path.write_text(json.dumps(result, indent=1))
    print(path)


if __name__ == "__main__":
    main()
