"""run.evaluate on one rank: sums and counts of the parts that are its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from echelon import activity
from echelon.parallel.average import Average
from echelon.prepare.loader import Feed

Judge = Callable[[nn.Module, Any], dict[str, tuple[Any, Any]]]

STOP = "<stop>"
"""Among the totals when this rank was asked to stop: all ranks hear of it where they add up."""


@activity.named("run.evaluate")
def totals(
    model: nn.Module,
    feed: Feed,
    fn: Judge,
    average: Average | None,
    stop: Callable[[], bool],
    together: bool = False,
) -> dict[str, list[float]]:
    """{name: [sum, count]} over this rank's samples, in float64; the model is in eval mode meanwhile.

    Ends early, with STOP among the names, once `stop()`. `together`: forwards meet, so a rank without samples runs along on a stand-in.
    """
    found: dict[str, list[float]] = {}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), average.swapped() if average else contextlib.nullcontext():
            for batch, counts in feed.evaluate(together):
                said = fn(model, batch)
                for name, (total, count) in said.items() if counts else ():
                    entry = found.setdefault(name, [0.0, 0.0])
                    entry[0] += float(total)
                    entry[1] += float(count)
                if not together and stop():
                    break
    finally:
        for module, training in modes:  # each its own: parts of a model may be kept in eval mode on purpose
            module.training = training
    return found | ({STOP: [1.0, 1.0]} if stop() else {})
