"""An optimizer as a registered name and numbers: what travels to a server instead of a pickled object. Pure."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from echelon.errors import UsageError

Number = float | int | bool
MAX = sys.float_info.max


@dataclass(frozen=True)
class Knob:
    """A number of an optimizer: torch's default, and what it may be."""

    default: Number
    holds: Callable[[Number], bool]
    must: str


def _positive(default: float) -> Knob:
    return Knob(default, lambda x: x >= 0, "0 or more")


def _share(default: float) -> Knob:
    return Knob(default, lambda x: 0 <= x < 1, "at least 0 and below 1")


def _any(default: float) -> Knob:
    return Knob(default, lambda x: True, "any number")


def _switch() -> Knob:
    return Knob(False, lambda x: True, "true or false")


_ADAM = {"lr": _positive(1e-3), "beta1": _share(0.9), "beta2": _share(0.999), "eps": _positive(1e-8)}

REGISTERED: Mapping[str, Mapping[str, Knob]] = {
    "sgd": {
        "lr": _positive(1e-3), "momentum": _positive(0.0), "dampening": _any(0.0), "weight_decay": _positive(0.0),
        "nesterov": _switch(), "maximize": _switch(),
    },
    "adagrad": {
        "lr": _positive(1e-2), "lr_decay": _positive(0.0), "weight_decay": _positive(0.0),
        "initial_accumulator_value": _positive(0.0), "eps": _positive(1e-10), "maximize": _switch(),
    },
    "rmsprop": {
        "lr": _positive(1e-2), "alpha": _positive(0.99), "eps": _positive(1e-8), "weight_decay": _positive(0.0),
        "momentum": _positive(0.0), "centered": _switch(), "maximize": _switch(),
    },
    "adam": {**_ADAM, "weight_decay": _positive(0.0), "amsgrad": _switch(), "maximize": _switch()},
    "adamw": {**_ADAM, "weight_decay": _positive(1e-2), "amsgrad": _switch(), "maximize": _switch()},
}  # fmt: skip
"""Every optimizer that a server can run, with the numbers it takes. Names are torch's, betas as two."""


@dataclass(frozen=True)
class Recipe:
    """An optimizer's name and all of its numbers: those not given are torch's defaults. Checked when made."""

    name: str
    numbers: Mapping[str, Number]

    def __post_init__(self) -> None:
        knobs = REGISTERED.get(self.name) if isinstance(self.name, str) else None
        if knobs is None:
            raise UsageError(
                f"no optimizer is registered as {self.name!r}",
                remedy=f"{_nearest(self.name, REGISTERED)}Registered are {', '.join(REGISTERED)}; any other runs with apply=worker.",
            )
        for name, value in self.numbers.items():
            _check(self.name, knobs, name, value)
        given = dict(self.numbers)
        if given.get("nesterov") and (given.get("momentum", 0) <= 0 or given.get("dampening", 0) != 0):
            raise UsageError(
                f"sgd: nesterov with momentum={given.get('momentum', 0):g} and dampening={given.get('dampening', 0):g}",
                remedy="Nesterov momentum needs a momentum above 0 and no dampening.",
            )
        whole = {name: type(knob.default)(given.get(name, knob.default)) for name, knob in knobs.items()}
        object.__setattr__(self, "numbers", MappingProxyType(whole))

    def with_numbers(self, numbers: Mapping[str, Number]) -> Recipe:
        """The same optimizer with some numbers changed: what a schedule does."""
        if numbers.items() <= self.numbers.items():
            return self
        return Recipe(self.name, {**self.numbers, **numbers})

    def to_plain(self) -> dict[str, object]:
        """For a frame or a JSON file."""
        return {"name": self.name, "numbers": dict(self.numbers)}

    @classmethod
    def from_plain(cls, plain: object) -> Recipe:
        """Of what came from a wire or a file: distrusted."""
        if not isinstance(plain, Mapping) or set(plain) != {"name", "numbers"}:
            what = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise UsageError(
                f"an optimizer's recipe is {{name, numbers}}, and this is {what}",
                remedy='As in {"name": "sgd", "numbers": {"lr": 0.1}}.',
            )
        if not isinstance(plain["numbers"], Mapping):
            raise UsageError(
                f"the numbers of {plain['name']!r} are {type(plain['numbers']).__name__}",
                remedy='They are a table: {"lr": 0.1, "momentum": 0.9}.',
            )
        return cls(plain["name"], plain["numbers"])


def _check(optimizer: str, knobs: Mapping[str, Knob], name: str, value: object) -> None:
    knob = knobs.get(name)
    if knob is None:
        raise UsageError(
            f"{optimizer} has no number {name!r}", remedy=f"{_nearest(name, knobs)}It has {', '.join(knobs)}."
        )
    if isinstance(knob.default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{optimizer}: {name}={value!r}", remedy=f"{name} is true or false.")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX <= value <= MAX:
        raise UsageError(
            f"{optimizer}: {name}={value!r} is no finite number", remedy=f"{name} is {knob.must}."
        )
    if not knob.holds(value):
        raise UsageError(f"{optimizer}: {name}={value:g} is out of range", remedy=f"{name} is {knob.must}.")


def _nearest(name: object, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}? " if near else ""
