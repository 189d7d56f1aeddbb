"""What passes between the workers that share a layer: four functions, each the backward of another.

    copy    the same tensor on every rank; in backward the gradients of all ranks are added
    add     every rank's part is added; in backward each gets the whole gradient
    gather  every rank's stretch of a dimension, in the order of ranks; in backward each keeps its own stretch
    cut     this rank's stretch; in backward the stretches are gathered

Outside of layers that are split, activations and their gradients are the same on all ranks; what these do keeps that true. All
ranks call the same ones in the same order. A lost peer is told to `lost`; the tensor is of no use then, and the step is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.errors import LoopError, UsageError
from echelon.mesh.moves import Verb, factor
from echelon.parallel.tensor.pieces import dealt

MEETING_LIMIT_S = 1800.0


_by_itself = [0]


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Inside, nobody is asked: layers are run to see how long they take, and only here."""
    _by_itself[0] += 1
    try:
        yield
    finally:
        _by_itself[0] -= 1


def shape_only(x: Tensor) -> bool:
    """Numbers do not matter, and nobody is asked for them. Tensors with which a forward is recorded are known by their type's name, as
    importing it is slow."""
    return _by_itself[0] > 0 or type(x).__name__ == "FakeTensor"


class Axis:
    """The ranks that share layers, and who is told when one is lost. Copies of a model share it."""

    def __init__(
        self,
        group: Group,
        lost: Callable[[Outcome], None],
        streams: bool = True,
        reads: Group | None = None,
    ) -> None:
        self.group, self.lost, self.streams, self.reads = group, lost, streams, reads
        """`reads`: the same ranks again, for outputs that are gathered when a script reads them; None: they are gathered at once."""
        self.outputs = 0
        """Of such outputs so far."""
        self.rank, self.size = group.rank, group.size
        self.expects = False
        """While a step's shapes are looked at."""
        self._seen = 0.0
        self._dealt: list[tuple[float, Callable[[], bool]]] = []
        self.passes = 0
        """Forwards of the model so far."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "this model is split over workers, and pickling it would write one worker's pieces",
            remedy="run.save(path) writes the whole model as a plain state dict.",
        )

    def expect(self, so: bool) -> None:
        """From now on, from nothing; or no more."""
        self.expects = so
        if so:
            self._seen, self._dealt = 0.0, []

    @property
    def expected(self) -> float:
        """What the shapes of the step that was looked at make this rank send, in its backward too."""
        return self._seen + sum(sent for sent, read in self._dealt if read())

    def look(self, verb: Verb, x: Tensor, counts: bool = True) -> None:
        """A forward passed here, and will have sent `x` this way once its backward is over; a backward is not looked at itself."""
        if self.expects and counts and torch._C._current_graph_task_id() == -1 and not shape_only(x):
            self._seen += x.nbytes * factor(verb, self.size)

    def look_again(self, x: Tensor, read: Callable[[], bool]) -> None:
        """An output that stays dealt for now: whether later ones are gathered at once is known when its step is over."""
        if self.expects:
            self._dealt.append((x.nbytes * factor("all_gather", self.size), read))

    def next_pass(self, module: object, args: object) -> None:
        """The model's forward begins: a hook."""
        self.passes += 1

    @activity.named("a layer that several workers share")
    def sum(self, x: Tensor) -> Tensor:
        """x becomes the sum over ranks, in place."""
        if shape_only(x):
            return x
        self._wait(self.group.all_reduce(x).wait(Deadline.after(MEETING_LIMIT_S)))
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks in memory of its own: for gradients of whole parameters that each rank uses for a part of the features."""
        return self.sum(x.detach().clone(memory_format=torch.contiguous_format))

    def max(self, x: Tensor) -> Tensor:
        """x becomes the largest over ranks, in place."""
        self._wait(self.group.all_reduce(x, "max").wait(Deadline.after(MEETING_LIMIT_S)))
        return x

    @activity.named("a layer that several workers share")
    def gathered(self, x: Tensor, dim: int, units: int, group: Group | None = None) -> Tensor:
        """The stretches of dimension `dim`, dealt in `units`, of all ranks; through another group if it is given."""
        each = x.shape[dim] // (dealt(units, self.size, self.rank)[1] - dealt(units, self.size, self.rank)[0])
        sizes = [
            each * (last - first) for first, last in (dealt(units, self.size, r) for r in range(self.size))
        ]
        mine = x.movedim(dim, 0)
        if sizes[0] > mine.shape[0]:  # pieces of one size travel
            mine = torch.cat([mine, mine.new_zeros(sizes[0] - mine.shape[0], *mine.shape[1:])])
        mine = mine.contiguous()
        out = torch.empty(self.size, *mine.shape, dtype=x.dtype, device=x.device)
        if not shape_only(x):
            self._wait((group or self.group).all_gather(out, mine).wait(Deadline.after(MEETING_LIMIT_S)))
        whole = torch.cat([out[r, :size] for r, size in enumerate(sizes)])
        return whole.movedim(0, dim).contiguous()

    def read(self, x: Tensor, dim: int, units: int, number: int) -> Tensor:
        """Gathers an output, the `number`th, because the script reads it. In a group of its own: a rank that reads alone waits there, and
        never takes a layer's message for its own. LoopError where ranks read different ones."""
        assert self.reads is not None
        mine = torch.tensor([number], dtype=torch.int64, device=x.device)
        all_of_them = torch.empty(self.size, 1, dtype=torch.int64, device=x.device)
        outcome = self.reads.all_gather(all_of_them, mine).wait(Deadline.after(MEETING_LIMIT_S))
        self._wait(outcome)
        if not isinstance(outcome, Lost) and not bool((all_of_them == number).all()):
            raise LoopError(
                "workers that share a layer read outputs of different forwards",
                remedy="Read an output on all of them or on none, or have it gathered at once: tensor_plan=PATTERN:gather.",
            )
        return self.gathered(x, dim, units, self.reads)

    def mine(self, units: int) -> tuple[int, int]:
        """The units [first, last) of this rank."""
        return dealt(units, self.size, self.rank)

    def stretch(self, x: Tensor, dim: int, units: int) -> Tensor:
        """This rank's stretch of dimension `dim` of a whole tensor, in memory of its own."""
        first, last = self.mine(units)
        each = x.shape[dim] // units
        return x.narrow(dim, first * each, (last - first) * each).clone()

    def _wait(self, outcome: Outcome) -> None:
        if isinstance(outcome, Lost):
            self.lost(outcome)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        axis.look("all_reduce", x, ctx.needs_input_grad[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Add.apply(grads[0], ctx.axis), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        axis.look("all_reduce", x)
        return axis.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Copy.apply(grads[0], ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, units: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.units = axis, dim, units
        axis.look("all_gather", x)
        return axis.gathered(x, dim, units)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Cut.apply(grads[0], ctx.axis, ctx.dim, ctx.units), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, units: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.units = axis, dim, units
        mine = axis.stretch(x, dim, units)
        axis.look("all_gather", mine, ctx.needs_input_grad[0])
        return mine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Gather.apply(grads[0].contiguous(), ctx.axis, ctx.dim, ctx.units), None, None, None


def copy(x: Tensor, axis: Axis) -> Tensor:
    return _Copy.apply(x, axis)  # type: ignore[no-any-return]


def add(x: Tensor, axis: Axis) -> Tensor:
    return _Add.apply(x, axis)  # type: ignore[no-any-return]


def gather(x: Tensor, axis: Axis, dim: int, units: int) -> Tensor:
    return _Gather.apply(x, axis, dim, units)  # type: ignore[no-any-return]


def cut(x: Tensor, axis: Axis, dim: int, units: int) -> Tensor:
    return _Cut.apply(x, axis, dim, units)  # type: ignore[no-any-return]
