"""The mode in which construction is recorded: tensors are torch's fake ones, which have a shape, a type and a device, and no memory."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from echelon.errors import UsageError
from echelon.parallel.building.chain import Touches
from echelon.parallel.building.tape import Draw, Operation, Place, Tape, give_back

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

FILLING = {
    "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_",
    "zero_", "fill_", "copy_",
}  # fmt: skip
"""Operations after which nothing is left of what their first argument was."""

BLIND = FILLING - {"zero_", "fill_", "copy_"} | {"rand", "randn", "randint", "randperm"}
BLIND |= {f"{name}_like" for name in ("rand", "randn", "randint")}
"""Random operations that draw by the shape of their arguments alone, whatever the values are."""


class Recorder(FakeTensorMode):
    """Inside, tensors are recorded, not made; real ones that come in from outside stay real among themselves.

    What Python asks for by value (`.item()`, `if w.norm() > 1`, `nonzero`) is made from the tape on the spot: right, at the price of the
    memory that the answer takes. Generators move on as they would in plain construction. Operations on recorded tensors after the
    block are recorded as well, until they are made."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape = Tape()
        self.closed = False
        """The block is over: from now on a computation on recorded tensors is somebody who trains a model that is not there."""

        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # fake storages: as long as they are there, nobody else has their address
        self._inside = False
        with self:
            sample = torch.empty(0)
        self.marks = {*vars(nn.Parameter(sample)), *vars(sample)}
        """Attributes that torch gives to fake tensors; all others are a script's own."""
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if tensors and not fakes:
            return func(*args, **kwargs)
        changed = _changed(func, args, kwargs)
        if any(not isinstance(t, FakeTensor) for t in changed):
            return self._for_real(func, args, kwargs)
        self._refuse_training(func, fakes)
        draw = self._draw(func, args, kwargs)
        self._inside = True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES:
            return self._for_real(func, args, kwargs)
        finally:
            self._inside = False
            self.fake_tensor_converter.tensor_memo.clear()  # weak references: with them torch cannot convert a module's type
        self._record(func, args, kwargs, changed, result, draw)
        return result

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # copies of recorded tensors (nn.TransformerEncoder makes some) are recorded as well

    def place(self, tensor: Tensor) -> Place:
        """Where a recorded tensor lies; a real one is copied onto the tape."""
        if not isinstance(tensor, FakeTensor):
            return self.tape.constant(tensor)
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = self.tape.room(storage.nbytes(), tensor.device)
            self._alive.append(storage)
        return Place(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The real values of recorded tensors as they are now."""
        places = [self.place(t) for t in tensors]
        with torch.utils._python_dispatch._disable_current_modes():
            return self.tape.values(places)

    def _record(
        self, func: Any, args: Any, kwargs: Any, changed: list[Tensor], result: Any, draw: Draw | None
    ) -> None:
        known = len(self.tape.rooms)
        places = pytree.tree_map_only(Tensor, self.place, (args, kwargs))
        results = tuple(self.place(t) if isinstance(t, Tensor) else None for t in pytree.tree_leaves(result))
        created = frozenset(p.storage for p in results if p is not None and p.storage >= known) - frozenset(
            p.storage for p in pytree.tree_leaves(places) if isinstance(p, Place)
        )
        written = {self.place(t).storage for t in changed}
        if not created and not written:
            return  # a view, or a question about shapes
        reads = {p.storage for p in pytree.tree_leaves(places) if isinstance(p, Place)}
        fills: set[int] = set()
        if _name(func) in FILLING and _whole(changed[0]):
            fills = {self.place(changed[0]).storage}
            reads = {self.place(t).storage for t in _others(args, kwargs, changed[0])}
            fills -= reads
        touches = Touches(frozenset(reads - fills), frozenset(written - fills), created, frozenset(fills))
        self.tape.add(Operation(func, places, results, draw), touches)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Draw | None:
        """For a random operation: its generator as it is, which then moves on as if the operation were done."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        given = [g for g in pytree.tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
        generator = given[0] if given else _default_generator(args, kwargs)
        draw = Draw(generator, generator.get_state())
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if _name(func) in BLIND and len(tensors) < 2:
            self._scratch(func, args, kwargs)
        else:
            self._for_real(func, args, kwargs, of_copies=True)
        return draw

    def _scratch(self, func: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            real = pytree.tree_map_only(
                FakeTensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
                (args, kwargs),
            )
            result = func(*real[0], **real[1])
            nbytes = sum(t.nbytes for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
            del real, result
            give_back(nbytes)

    def _for_real(self, func: Any, args: Any, kwargs: Any, of_copies: bool = False) -> Any:
        """Does it now, with the values of recorded tensors made; what comes out is real."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fakes = [t for t in leaves if isinstance(t, FakeTensor)]
        made = iter(self.values(fakes))
        real = [
            next(made)
            if isinstance(t, FakeTensor)
            else t.clone()
            if of_copies and isinstance(t, Tensor)
            else t
            for t in leaves
        ]
        args, kwargs = pytree.tree_unflatten(real, spec)
        with torch.utils._python_dispatch._disable_current_modes():
            return func(*args, **kwargs)

    def _refuse_training(self, func: Any, fakes: Sequence[Tensor]) -> None:
        harmless = func.is_view or _name(func).endswith("_like") or _name(func).startswith("new_")
        if self.closed and torch.is_grad_enabled() and not harmless and any(t.requires_grad for t in fakes):
            raise UsageError(
                f"the model of run.build() is recorded, not made yet, and the script computes with it ({_name(func)})",
                remedy="Call run.prepare(model, …) first: there each worker makes what it keeps.",
            )


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that `func` writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _others(args: Any, kwargs: Any, first: Tensor) -> list[Tensor]:
    return [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not first]


def _whole(tensor: Tensor) -> bool:
    """Does it take up all of its storage, each byte once?"""
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    return dense and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _default_generator(args: Any, kwargs: Any) -> torch.Generator:
    device = kwargs.get("device")
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            device = leaf.device
    device = torch.device(device if device is not None else "cpu")
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    """Everything that is constructed inside is recorded. What cannot be is told with the script's line."""
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor"
        )  # torch's own deepcopy does
        try:
            with recorder:
                yield recorder
        except RuntimeError as error:
            if "not supported for tensor subclasses" not in str(error):
                raise
            raise UsageError(
                f"inside run.build() a tensor that is not made yet is handed to numpy{_line(error)}",
                remedy="Build that part before the block and copy it in, or stay with torch (.item() and .tolist() work).",
            ) from None
    recorder.closed = True


def _line(error: BaseException) -> str:
    """The last line of the script on the way to the error."""
    library, ours = os.path.dirname(torch.__file__), os.path.dirname(__file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, ours))
    ]
    frames = [f for f in frames if f.name != "build" and f.line != "yield"]
    return f"\n  {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
