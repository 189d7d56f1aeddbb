"""Optimizers on a server: which recipe a script's optimizer has, and ranges of parameters with their state.

A Range is a flat part of one tensor with what the optimizer keeps for it. Its state has torch's names, so that a checkpoint of it
is one more layout of the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.native import update
from echelon.ps.recipes import REGISTERED, Number, Recipe

APPLY_WORKER = "With apply=worker (the default of sync) any optimizer is right: it runs in the workers."
WHY_NOT = {
    "LBFGS": "it calls the model again within a step, and a server has none",
    "SparseAdam": "it takes sparse gradients, and servers keep dense ranges",
    "Muon": "it needs whole matrices, and servers keep flat ranges",
    "Adafactor": "its state are rows and columns of whole matrices, and servers keep flat ranges",
}


def recipe_of(optimizer: torch.optim.Optimizer) -> list[Recipe]:
    """The recipe of each parameter group, in order, as its numbers are now. Raises UsageError that says why there is none.

    How torch would have stepped (foreach, fused, capturable) does not matter here and is left out.
    """
    kind = type(optimizer)
    name = kind.__name__.lower()
    if name not in REGISTERED or kind is not getattr(torch.optim, kind.__name__, None):
        raise UsageError(f"servers cannot run {kind.__name__}: {_why_not(kind)}", remedy=APPLY_WORKER)
    recipes = []
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise UsageError(
                f"parameter group {number} of {kind.__name__} has differentiable=True: a server's step has no graph",
                remedy=APPLY_WORKER,
            )
        for p in group["params"]:
            if p.dtype not in update.DTYPES:
                raise UsageError(
                    f"parameter group {number} of {kind.__name__} has a parameter of {p.dtype}: servers know float32 and float64",
                    remedy=f"Keep the weights in float32 and compute in {p.dtype} with autocast. {APPLY_WORKER}",
                )
        decoupled = name == "adam" and group.get("decoupled_weight_decay")
        first = {
            k: v for k, v in optimizer.defaults.items() if k == "initial_accumulator_value"
        }  # torch looks in no group
        recipes.append(_of_group("adamw" if decoupled else name, {**group, **first}))
    return recipes


def _of_group(name: str, group: Mapping[str, object]) -> Recipe:
    found = dict(group)
    if "betas" in found:
        found["beta1"], found["beta2"] = found["betas"]  # type: ignore[misc]
    numbers: dict[str, Number] = {}
    for knob, sort in REGISTERED[name].items():
        value = found.get(knob, sort.default)
        value = value.item() if isinstance(value, Tensor) else value
        numbers[knob] = bool(value) if isinstance(sort.default, bool) else float(value)  # type: ignore[arg-type]
    return Recipe(name, numbers)


def _why_not(kind: type) -> str:
    if kind.__name__ in WHY_NOT:
        return WHY_NOT[kind.__name__]
    known = [base.__name__ for base in kind.__mro__[1:] if base.__name__.lower() in REGISTERED]
    if known:
        return f"it is a class of its own, and may step otherwise than {known[0]}"
    return f"they know {', '.join(REGISTERED)}"


class Range:
    """A flat range of one tensor with its optimizer's state. Not for two threads at once; the core's work holds no lock of Python.

    `param` is the caller's memory and changed in place. With `out`, apply() leaves this version as it is and writes the next one
    there: two ranges that take turns keep the version before the step, at no more memory traffic.
    """

    def __init__(self, recipe: Recipe, param: Tensor) -> None:
        update.check(param)
        self.recipe, self.param, self.step = recipe, param, 0
        self._known: tuple[Tensor, Tensor] | None = None
        """Memory before and after a step that was looked at and found right."""
        self.arrays: dict[str, Tensor] = {}
        if recipe.name == "adagrad":  # the only one whose state is there before the first step
            self.arrays["sum"] = torch.full_like(param, float(recipe.numbers["initial_accumulator_value"]))

    def apply(
        self,
        grad: Tensor | Sequence[Tensor],
        scale: float = 1.0,
        numbers: Mapping[str, Number] | Recipe | None = None,
        out: Range | None = None,
        copies: update.Copies = (),
    ) -> None:
        """One step with `scale` times the gradient, or times the sum of its parts in their order. `numbers` (a learning rate of this
        step) hold from now on; where many ranges step by one recipe, it is cheaper to give that. The new values go to `copies` too, in
        the same pass: there is room for them."""
        recipe, step = self._recipe(numbers), self.step + 1
        after = self if out is None else out
        parts = [grad] if isinstance(grad, Tensor) else grad
        self._check(after, parts)
        plan = _plan(recipe, step, scale, "momentum_buffer" not in self.arrays)
        arrays = {name: self._versions(name, after) if used else None for name, used in plan.arrays}
        update.step_checked(plan.kind, (self.param, after.param), parts, arrays, plan.settled, copies)
        self._keep(after, recipe, step, arrays)

    def _check(self, after: Range, parts: Sequence[Tensor]) -> None:
        """What update.check() sees to. A range's own memory is looked at when it is new here: there may be thousands of ranges."""
        param, known = self.param, self._known
        if known is None or known[0] is not param or known[1] is not after.param:
            update.check(param, after.param, *parts)
            if after is not self and after.param.data_ptr() == param.data_ptr() and param.numel():
                raise UsageError(
                    "the next version of a range needs memory of its own",
                    remedy="Make it with Range.another().",
                )
            self._known = (param, after.param)
        else:
            for part in parts:
                update.check_one(part, param)

    def another(self) -> Range:
        """Memory for another version of this range, for `out`."""
        other = Range(self.recipe, torch.empty_like(self.param))
        other.arrays = {name: torch.empty_like(x) for name, x in self.arrays.items()}
        return other

    def state(self) -> dict[str, Tensor]:
        """As torch's optimizer would have it for this parameter: the arrays themselves, and `step` where torch counts."""
        if not self.arrays:
            return {}
        counts = {} if self.recipe.name == "sgd" else {"step": torch.tensor(float(self.step))}
        return {**counts, **self.arrays}

    def load(self, state: Mapping[str, Tensor | None]) -> None:
        """Takes over what state() gave, here or in torch's optimizer, cut to this range; copies it."""
        known = _arrays(self.recipe)
        for name in state:
            if name != "step" and name not in known:
                raise UsageError(
                    f"{self.recipe.name} keeps no {name!r}",
                    remedy=f"Its state is {', '.join(['step', *known])}: is this the checkpoint of another optimizer?",
                )
        if state and self.recipe.name != "sgd" and state.get("step") is None:
            raise UsageError(
                f"the state of {self.recipe.name} is without its step",
                remedy="Take it from the optimizer's state_dict.",
            )
        arrays = {name: x for name, x in state.items() if name != "step" and x is not None}
        if arrays:
            update.check(self.param, *arrays.values())
        self.arrays = {name: x.detach().clone() for name, x in arrays.items()}
        step = state.get("step")
        self.step = 0 if step is None else int(step)

    def _recipe(self, numbers: Mapping[str, Number] | Recipe | None) -> Recipe:
        if not isinstance(numbers, Recipe):
            return self.recipe.with_numbers(numbers) if numbers else self.recipe
        if numbers.name != self.recipe.name:
            raise UsageError(
                f"a range of {self.recipe.name} was told to step by {numbers.name}",
                remedy="Its state means nothing to another optimizer: make a new Range.",
            )
        return numbers

    def _versions(self, name: str, after: Range) -> update.Versions:
        before = self.arrays.get(name)
        if before is None:  # not kept before the step succeeded
            fresh = torch.zeros_like(self.param)
            return fresh, fresh
        if after is self:
            return before, before
        if name not in after.arrays:
            after.arrays[name] = torch.empty_like(before)
        return before, after.arrays[name]

    def _keep(
        self, after: Range, recipe: Recipe, step: int, arrays: Mapping[str, update.Versions | None]
    ) -> None:
        """What the step left, once it is done: the version after it is whole or as before."""
        kept: dict[str, Tensor] = {}
        for name, x in self.arrays.items():
            if (
                arrays.get(name) is None
            ):  # not used by this step, such as the buffer of a momentum that is 0 now
                kept[name] = x if after is self else x.clone()
        for name, pair in arrays.items():
            if pair is not None:
                kept[name] = pair[1]
        after.arrays, after.recipe, after.step = kept, recipe, step


class _Plan(NamedTuple):
    """What is the same for all ranges that step alike."""

    recipe: Recipe
    step: int
    scale: float
    first: bool
    kind: str
    arrays: tuple[tuple[str, bool], ...]
    settled: dict[str, Number]


_last: list[_Plan] = []
"""The last one made. Ranges step one after the other by one recipe; two threads that take turns make it anew."""


def _plan(recipe: Recipe, step: int, scale: float, first: bool) -> _Plan:
    for plan in _last[:]:
        if (
            plan.recipe is recipe
            and (plan.step, plan.scale, plan.first) == (step, scale, first)
            and scale != 0
        ):
            return plan
    kind = "adam" if recipe.name == "adamw" else recipe.name
    settled = _settled(recipe, step, scale, first)
    plan = _Plan(recipe, step, scale, first, kind, tuple(_arrays(recipe).items()), settled)
    _last[:] = [plan]
    return plan


def _arrays(recipe: Recipe) -> dict[str, bool]:
    """The arrays of an optimizer, and whether these numbers use each."""
    numbers = recipe.numbers
    if recipe.name == "sgd":
        return {"momentum_buffer": numbers["momentum"] != 0}
    if recipe.name == "adagrad":
        return {"sum": True}
    if recipe.name == "rmsprop":
        return {
            "square_avg": True,
            "momentum_buffer": numbers["momentum"] > 0,
            "grad_avg": bool(numbers["centered"]),
        }
    return {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": bool(numbers["amsgrad"])}


def _settled(recipe: Recipe, step: int, scale: float, first: bool) -> dict[str, Number]:
    """The numbers of one step as its kernel takes them. Computed as torch.optim computes them, to the bit."""
    n = dict(recipe.numbers)
    settled: dict[str, Number] = {"scale": -scale if n.pop("maximize") else scale}
    if recipe.name == "sgd":
        return settled | n | {"first": first}
    if recipe.name == "adagrad":
        lr = n["lr"] / (1 + (step - 1) * n["lr_decay"])
        return settled | {"weight_decay": n["weight_decay"], "lr": lr, "eps": n["eps"]}
    if recipe.name == "rmsprop":
        return settled | n
    lr, decay = n.pop("lr"), n.pop("weight_decay")
    apart = recipe.name == "adamw"
    return settled | n | {
        "weight_decay": 0.0 if apart else decay,
        "shrink": 1 - lr * decay if apart else 1.0,
        "step_size": lr / (1 - n["beta1"] ** step),
        "correction": (1 - n["beta2"] ** step) ** 0.5,
    }  # fmt: skip
