"""The steps of one form, counted: steps.py OUT FORM, started by `echelon run` like any script. Each worker leaves a list of what each
of the COUNTED steps took: calls of Python functions on the main thread, messages, and bytes.

A step goes from one yielded batch to the next. None of them is at an end of an epoch.
"""

from __future__ import annotations

import collections
import functools
import gc
import json
import sys
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import echelon
from echelon.comm.over_native import NativeGroup
from echelon.ps.link import Link
from tests.equality import split_zoo, zoo
from tests.exact.forms import FORMS
from tests.runs import moved_bytes

BATCH = 8
COUNTED = (6, 7, 8)

LEFT_OUT = {
    "over_native.py NativeWork.wait": "looks whether it is over, and tells that it waits only if it is not",
    "pending.py Pending.wait": "looks whether the answer is there",
    "pending.py Pending.then": "what follows an answer runs on this thread if it is there, else on the link's",
    "window.py Window._send_more": "whichever thread comes first sends for all",
    "window.py Batch.wait": "looks whether the answers are there",
    "threading.py Condition.wait": "waits, unless there is nothing to wait for",
    "threading.py Event.wait": "waits, unless there is nothing to wait for",
}
"""Functions that poll or wait, with why what they call is chance: they count, what they call does not."""

PLACES = {str(Path(module.__file__ or "").parent) + "/": module.__name__ for module in (echelon, torch)}
OWN = __file__


class Calls:
    """Counts the calls of the thread that it is set for: sys.setprofile."""

    def __init__(self) -> None:
        self.counts: collections.Counter[CodeType] = collections.Counter()
        self._inside = 0
        self._ends: dict[CodeType, bool] = {}

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if self._inside:
                self._inside += 1
                return
            self.counts[code] += 1
            if code not in self._ends:
                self._ends[code] = f"{Path(code.co_filename).name} {code.co_qualname}" in LEFT_OUT
            if self._ends[code]:
                self._inside = 1
        elif event == "return" and self._inside:
            self._inside -= 1

    def told(self) -> dict[str, int]:
        """Calls so far, by module of Echelon, of torch, of others. Comprehensions are calls in one Python and none in the next: left out."""
        found: collections.Counter[str] = collections.Counter()
        for code, number in self.counts.items():
            if code.co_filename != OWN and not code.co_name.endswith("comp>"):
                found[_place(code.co_filename)] += number
        return dict(found)


@functools.cache
def _place(file: str) -> str:
    for folder, name in PLACES.items():
        if file.startswith(folder):
            return f"{name}/{file.removeprefix(folder)}" if name == "echelon" else name
    return "others"


class Messages:
    """Counts what is asked of the wires, by whichever thread."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._watch(NativeGroup, "_begun", lambda what, *rest: what)
        self._watch(NativeGroup, "send", lambda *rest: "send")
        self._watch(NativeGroup, "recv", lambda *rest: "recv")
        self._watch(Link, "call", lambda verb, *rest: verb)

    def _watch(self, owner: type, name: str, called: Any) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def counting(this: Any, *args: Any, **options: Any) -> Any:
            self.counts[called(*args)] += 1
            return inner(this, *args, **options)

        setattr(owner, name, counting)


def moved(run: Any) -> dict[str, float]:
    """By the wires' own counters."""
    return {
        name: int(number) if number == int(number) else number for name, number in moved_bytes(run).items()
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.disable()  # whatever it frees would be a call now and then
    out, form, run = Path(sys.argv[1]), FORMS[sys.argv[2]], echelon.init()
    calls, messages, seen = Calls(), Messages(), []
    model, dataset = split_zoo.make("gpt")
    dataset = TensorDataset(*[x[:BATCH].repeat(COUNTED[-1] + 3, 1) for x in dataset.tensors])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(dataset, batch_size=BATCH))
    for step, (x, y) in enumerate(loader, start=1):
        sys.setprofile(None)
        if step in (*COUNTED, COUNTED[-1] + 1):
            seen.append({"calls": calls.told(), "messages": dict(messages.counts), "bytes": moved(run)})
        sys.setprofile(calls)
        if form.stepped:
            run.step(zoo.mean_ce, (x, y), clip_norm=form.clip)
        else:
            zoo.mean_ce(model(x), y).backward()
            if form.clip:
                run.clip_grad_norm(model, form.clip)
            optimizer.step()
            optimizer.zero_grad()
    sys.setprofile(None)
    (out / f"{run.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
