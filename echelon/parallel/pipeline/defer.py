"""Weight gradients put off: backward gives only the gradients of inputs, the rest is computed later, when a rank would be idle.

Only for parameters that a stage uses in nothing but linear layers and convolutions; all others get their gradient in backward. Each parameter
gets one gradient a micro-batch, so its hooks run as often as with ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.parallel.pipeline.record import Leaf, Named, Node, parts_of

LINEAR = (F.linear,)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)
MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def deferrable(model: nn.Module, nodes: tuple[Node, ...]) -> frozenset[str]:
    """Names of parameters that these nodes use in linear layers and convolutions alone."""
    may: set[str] = set()
    not_so: set[str] = set()
    first = {id(p): name for name, p in model.named_parameters()}
    for node in nodes:
        good: set[str] = set()
        if isinstance(node.call, Leaf):
            for module in model.get_submodule(node.call.path).modules():
                if type(module) in MODULES and not hasattr(module, "parametrizations"):
                    good |= {first[id(p)] for p in module._parameters.values() if p is not None}
        elif node.call in (*LINEAR, *CONVOLUTIONS):
            good = {ref.name for ref in parts_of((node.args[1:], node.kwargs), Named)}
        may |= good
        not_so |= set(node.names) - good
    return frozenset(may - not_so)


class Later:
    """What is still to be computed for one micro-batch."""

    def __init__(self) -> None:
        self.todo: list[tuple[tuple[Tensor, ...], Callable[[], tuple[Tensor, ...]]]] = []
        self._kept: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of what is kept for it."""
        return sum(self._kept.values())

    def add(
        self,
        parameters: tuple[Tensor, ...],
        compute: Callable[[], tuple[Tensor, ...]],
        keeps: tuple[Tensor, ...] = (),
    ) -> None:
        """`keeps`: what `compute` refers to."""
        self.todo.append((parameters, compute))
        self._kept |= {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in keeps}

    def run(self) -> None:
        """Gradients of every parameter, through autograd: hooks see them."""
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for parameters, compute in self.todo:
            for parameter, grad in zip(parameters, compute(), strict=True):
                old = sums.get(id(parameter))
                sums[id(parameter)] = (parameter, grad if old is None else old[1] + grad)
        self.todo.clear()
        if sums:
            found = list(sums.values())
            torch.autograd.backward([parameter for parameter, _ in found], [grad for _, grad in found])


class Deferring(TorchFunctionMode):
    """While it is active, linear layers and convolutions of these parameters put their weight gradients off."""

    def __init__(self, later: Later, parameters: set[int]) -> None:
        super().__init__()
        self.later, self.parameters = later, parameters
        self.anchor = torch.zeros((), requires_grad=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func in LINEAR:
                found = _linear(*args, **kwargs)
                if self._ours(*found[1:]):
                    return _Linear.apply(found[0], self.anchor, found[1:], self.later)
            elif func in CONVOLUTIONS:
                found, options = _convolution(*args, **kwargs)
                if options is not None and self._ours(*found[1:]):
                    return _Convolution.apply(found[0], self.anchor, found[1:], options, self.later)
        return func(*args, **kwargs)

    def _ours(self, weight: Tensor, bias: Tensor | None) -> bool:
        known = [t for t in (weight, bias) if t is not None]
        return weight.requires_grad and all(id(t) in self.parameters or not t.requires_grad for t in known)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                 dilation: Any = 1, groups: int = 1) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:  # fmt: skip
    dims = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return (input, weight, bias), None

    def each(number: Any) -> list[int]:
        found = [number] if isinstance(number, int) else list(number)
        return found * dims if len(found) == 1 else found

    return (input, weight, bias), (each(stride), each(padding), each(dilation), groups)


# The parameters are no inputs of the functions below: autograd would call their hooks in backward although there is no gradient yet. The
# anchor, a number that needs a gradient, makes backward happen where x needs none.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, state: tuple[Tensor, Tensor | None], later: Later
    ) -> Tensor:
        weight, bias = state
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x if x.dtype == y.dtype else x.to(y.dtype), weight.detach())
        ctx.weight, ctx.bias = (
            weight,
            bias,
        )  # the parameters themselves: saved ones come back detached when computed again
        ctx.later, ctx.kind = later, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, values = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dx = dy.matmul(values.to(dy.dtype)).to(ctx.kind) if ctx.needs_input_grad[0] else None
        wanted = tuple(t for t in (weight, bias) if t is not None and t.requires_grad)

        def compute() -> tuple[Tensor, ...]:
            rows = dy.reshape(-1, dy.shape[-1])
            found = []
            if weight.requires_grad:
                found.append(rows.t().mm(x.reshape(-1, x.shape[-1])).to(weight.dtype))
            if bias is not None and bias.requires_grad:
                found.append(rows.sum(0).to(bias.dtype))
            return tuple(found)

        ctx.later.add(wanted, compute, (x, dy))
        return dx, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, state: tuple[Tensor, Tensor | None], options: tuple[Any, ...], later: Later) -> Tensor:  # fmt: skip
        weight, bias = state
        stride, padding, dilation, groups = options
        nothing = [0] * len(stride)
        y = torch.convolution(x, weight, bias, stride, padding, dilation, False, nothing, groups)
        ctx.save_for_backward(x if x.dtype == y.dtype else x.to(y.dtype), weight.detach())
        ctx.weight, ctx.bias = (
            weight,
            bias,
        )  # the parameters themselves: saved ones come back detached when computed again
        ctx.later, ctx.kind, ctx.options = later, x.dtype, options
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, values = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        stride, padding, dilation, groups = ctx.options
        sizes = [dy.shape[1]] if bias is not None else None

        def gradients(of_x: bool, of_weight: bool, of_bias: bool) -> Any:
            # later only its shape is asked for: the values may be gone by then
            w = values.to(dy.dtype) if of_x else dy.new_empty(1).expand(weight.shape)
            return torch.ops.aten.convolution_backward(
                dy, x, w, sizes, stride, padding, dilation, False, [0] * len(stride), groups,
                [of_x, of_weight, of_bias],
            )  # fmt: skip

        dx = gradients(True, False, False)[0].to(ctx.kind) if ctx.needs_input_grad[0] else None
        wanted = tuple(t for t in (weight, bias) if t is not None and t.requires_grad)

        def compute() -> tuple[Tensor, ...]:
            _, dw, db = gradients(False, weight.requires_grad, bias is not None and bias.requires_grad)
            found = (
                (weight, dw),
                (bias, db),
            )
            return tuple(grad.to(t.dtype) for t, grad in found if t is not None and t.requires_grad)

        ctx.later.add(wanted, compute, (x, dy))
        return dx, None, None, None, None
