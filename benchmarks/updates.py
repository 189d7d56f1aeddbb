"""A server's optimizer step beside torch's own and beside the limit of memory, on one thread (or --threads of each).

    python benchmarks/updates.py [--mib 100] [--rounds 20] [--threads 1] [--only sgd adam] [--file]

Each round times them in turn: the core over ranges, torch.optim with foreach=False (its default on CPUs), foreach=True and, where it has that,
fused=True, which goes over memory once as well, a copy and a negation in place. The limit is the bytes that a step must read and write, at the rate of the faster one of these two. Ratios are taken within a round; told are medians and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import record

from echelon.ps.optimizers import Range, recipe_of

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object], int]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3}, 3),
    "sgd with momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}, 5),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}, 5),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}, 5),
    "adam": (torch.optim.Adam, {"lr": 1e-3}, 7),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}, 7),
}
"""How many times the size of the parameters a step must read or write: parameter and each state both ways, the gradient once."""


def ours(
    recipe_from: torch.optim.Optimizer, numel: int, grad: torch.Tensor, threads: int
) -> Callable[[], object]:
    recipe = recipe_of(recipe_from)[0]
    ranges = [Range(recipe, part) for part in torch.randn(numel).tensor_split(threads)]
    parts = grad.tensor_split(threads)
    if threads == 1:
        return lambda: ranges[0].apply(grad)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda pair: pair[0].apply(pair[1]), zip(ranges, parts, strict=True)))


def theirs(
    kind: type[torch.optim.Optimizer], numbers: dict[str, object], grad: torch.Tensor, **how: bool
) -> Callable[[], object]:
    p = torch.nn.Parameter(torch.randn_like(grad))
    p.grad = grad
    return kind([p], **how, **numbers).step  # type: ignore[call-arg]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(name: str, mib: int, rounds: int, threads: int) -> dict[str, object]:
    kind, numbers, passes = CASES[name]
    numel = mib * 2**20 // 4
    grad, copy = torch.randn(numel), torch.empty(numel)
    calls = {
        "core": ours(kind([torch.zeros(1)], **numbers), numel, grad, threads),  # type: ignore[call-arg]
        "torch": theirs(kind, numbers, grad, foreach=False),
        "foreach": theirs(kind, numbers, grad, foreach=True),
        "copy": lambda: copy.copy_(grad),
        "in place": lambda: copy.neg_(),
    }
    if kind is not torch.optim.RMSprop:
        calls["fused"] = theirs(kind, numbers, grad, fused=True)
    for call in calls.values():  # states are made, pages touched
        call()
        call()
    times: dict[str, list[float]] = {key: [] for key in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for key in order:
            times[key].append(seconds(calls[key]))
    limits = [min(pair) * passes / 2 for pair in zip(times["copy"], times["in place"], strict=True)]
    times["limit"] = limits
    ratios = {}
    for key in ("torch", "foreach", "fused", "limit"):
        if key in times:
            each = [a / b for a, b in zip(times[key], times["core"], strict=True)]
            ratios[f"{key} / core"] = record.verdict(each, goal=0.5 if key == "limit" else 1.0)
    return {"ms": {key: statistics.median(t) * 1e3 for key, t in times.items()}, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=record.ROUNDS_NEEDED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--file", action="store_true", help="leave a file in benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {}
    for name in args.only:
        results[name] = one = measure(name, args.mib, args.rounds, args.threads)
        print(f"{name}: {one['ms']['core']:.1f} ms", flush=True)  # type: ignore[index]
        for key, ratio in one.items():
            if key != "ms":
                print(
                    "  {key:>15}: {median:5.2f} ({lower:.2f} to {upper:.2f})".format(key=key, **ratio),
                    flush=True,
                )  # type: ignore[arg-type]
    if args.file:
        print(record.write("updates", results, mib=args.mib, threads=args.threads))


if __name__ == "__main__":
    main()
