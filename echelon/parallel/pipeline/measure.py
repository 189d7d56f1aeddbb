"""How long each node of a record takes, forward and backward: measured one node at a time, on tensors of the recorded shapes.

Only one node's memory is there at a time, so a model that fits no single worker is measured as well: parameters that are
placeholders get random numbers. Nodes that do the same on the same shapes are measured once. When the time allowed is over, the rest is
estimated from operations and bytes, at the speed of those that were measured. Nothing of the model changes: no buffer, gradient or random state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.parallel.pipeline.placing import is_placeholder
from echelon.parallel.pipeline.record import (
    Leaf,
    Meta,
    Named,
    Node,
    Record,
    SetBuffer,
    Value,
    swap,
    tensors_of,
)
from echelon.parallel.pipeline.trace import named

ROUNDS = 5

GRAIN_NS = 100
"""Costs are whole multiples of this: plain numbers that travel."""

FLOPS_PER_NS, BYTES_PER_NS = 10.0, 4.0
"""A guess at a core's speed, where nothing was measured."""

FAILURES = (RuntimeError, ValueError, IndexError, TypeError)
"""What a node may say to random numbers; it is estimated then."""


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of forward and backward."""

    nodes: tuple[int, ...]
    """Of each node; 0 for those that are computed wherever they are needed."""

    loss: int
    measured: int
    """How many nodes were measured, by themselves or by one like them; the others are estimates."""


def measure(model: nn.Module, record: Record, args: tuple[Any, ...], kwargs: Mapping[str, Any], deadline: Deadline,
            loss: tuple[Callable[[Any, Any], Tensor], Any] | None = None) -> Costs:  # fmt: skip
    """The cost of every node. `args` and `kwargs` are inputs of the record; `loss` the loss function and a target. Ends soon after the deadline."""
    bench = _Bench(model, record, dict(zip(record.inputs, tensors_of((args, dict(kwargs))), strict=True)))
    likes: dict[Hashable, list[int]] = {}
    for at, node in enumerate(record.nodes):
        if not node.free and not isinstance(node.call, SetBuffer):
            likes.setdefault(bench.likeness(node), []).append(at)
    guesses = {key: bench.guess(record.nodes[ats[0]]) for key, ats in likes.items()}
    found: dict[Hashable, float] = {}
    loss_ns = 0.0
    with (
        torch.random.fork_rng(devices=[torch.cuda.current_device()] if bench.cuda else []),
        torch.enable_grad(),
    ):
        if loss is not None:
            loss_ns = bench.loss(*loss, deadline) or 0.0
        for key in sorted(likes, key=lambda key: (-guesses[key] * len(likes[key]), likes[key][0])):
            if deadline.passed:
                break
            took = bench.node(record.nodes[likes[key][0]], deadline)
            if took is not None:
                found[key] = took
    scale = sum(found.values()) / sum(guesses[key] for key in found) if found else 1.0
    costs = [0] * len(record.nodes)
    for key, ats in likes.items():
        for at in ats:
            costs[at] = _rounded(found.get(key, guesses[key] * scale))
    return Costs(tuple(costs), _rounded(loss_ns), sum(len(likes[key]) for key in found))


def _rounded(ns: float) -> int:
    return GRAIN_NS * max(1, round(ns / GRAIN_NS))


class _Bench:
    def __init__(self, model: nn.Module, record: Record, inputs: dict[int, Tensor]) -> None:
        self.model, self.record, self.inputs = model, record, inputs
        self.state = named(model)
        self.cuda = any(meta.device.type == "cuda" for meta in record.values)

    def likeness(self, node: Node) -> Hashable:
        """Nodes with the same one do the same amount of work."""
        call: Any = node.call
        if isinstance(call, Leaf):
            module = self.model.get_submodule(call.path)
            call = (type(module), repr(module), module.training)
        state = tuple((tuple(self.state[name].shape), self.state[name].dtype) for name in node.names)
        tree = swap(self._like, (node.args, node.kwargs), (Value, Named))
        return call, repr(tree), state, node.setting.grad, node.setting.autocast

    def _like(self, ref: Value | Named) -> Any:
        if isinstance(ref, Named):
            return "state", tuple(self.state[ref.name].shape), self.state[ref.name].dtype
        meta = self.record.values[ref.number]
        return meta.shape, meta.dtype, meta.grad

    def guess(self, node: Node) -> float:
        moved = sum(self.record.values[number].nbytes for number in (*node.takes, *node.gives))
        moved += sum(self.record.sizes[name] for name in node.names)
        return 3 * max(node.flops / FLOPS_PER_NS, moved / BYTES_PER_NS, 1.0)

    def node(self, node: Node, deadline: Deadline) -> float | None:
        """Nanoseconds of one node, or None if it cannot run on made-up numbers, or not on this rank alone."""
        if any(type(self.state[name]) not in (Tensor, nn.Parameter) for name in node.names):
            return None
        fresh = {name: _like_state(self.state[name]) for name in node.names}

        def prepare() -> Callable[[], list[Tensor]]:
            values = {number: self._value(number, bool(node.renames)) for number in node.takes}
            fill = swap(
                lambda ref: values[ref.number] if isinstance(ref, Value) else fresh[ref.name],
                (node.args, node.kwargs),
                (Value, Named),
            )
            call = (
                self.model.get_submodule(node.call.path).forward if isinstance(node.call, Leaf) else node.call
            )
            assert not isinstance(call, (Leaf, SetBuffer))
            return lambda: tensors_of(call(*fill[0], **fill[1]))

        with contextlib.ExitStack() as stack:
            if isinstance(node.call, Leaf):
                stack.enter_context(_with_state(self.model, fresh))
            for kind, enabled, dtype in node.setting.autocast or ():
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            if not node.setting.grad:
                stack.enter_context(torch.no_grad())
            return self._time(prepare, deadline, 2 if node.setting.region >= 0 else 1)

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], target: Any, deadline: Deadline) -> float | None:
        def prepare() -> Callable[[], list[Tensor]]:
            output = swap(
                lambda ref: (
                    self._value(ref.number, False)
                    if isinstance(ref, Value)
                    else self.state[ref.name].detach()
                ),
                self.record.output,
                (Value, Named),
            )
            return lambda: [loss_fn(output, target)]

        return self._time(prepare, deadline, 1)

    def _time(self, prepare: Callable[[], Callable[[], list[Tensor]]], deadline: Deadline, forwards: int) -> float | None:  # fmt: skip
        """The fastest of a few rounds of forward and backward: what is slower is somebody else's work on this machine."""
        rounds: list[float] = []
        for _ in range(ROUNDS):
            try:
                call = prepare()
                began = self._now()
                made = call()
                forward = self._now() - began
                roots = [tensor for tensor in made if tensor.requires_grad]
                starts = [torch.ones_like(tensor) for tensor in roots]
                began = self._now()
                if roots:
                    torch.autograd.backward(roots, starts)
                rounds.append(forwards * forward + self._now() - began)
            except FAILURES:
                return None
            if deadline.passed:
                break
        return 1e9 * min(rounds)

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _value(self, number: int, written: bool) -> Tensor:
        meta = self.record.values[number]
        made = self.inputs[number].detach() if number in self.inputs else _random(meta)
        if meta.grad:
            made.requires_grad_()
        return made.clone() if written else made


def _random(meta: Meta) -> Tensor:
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        return torch.randn(meta.shape, dtype=meta.dtype, device=meta.device)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _like_state(tensor: Tensor) -> Tensor:
    """The same numbers, where nobody's gradient or hook is touched; random ones for a placeholder; a copy of a buffer, which may be written."""
    grad = tensor.requires_grad
    if is_placeholder(tensor):
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        made = made.normal_(0, 0.02) if tensor.dtype.is_floating_point else made
    else:
        made = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    return made.requires_grad_(grad)


@contextlib.contextmanager
def _with_state(model: nn.Module, fresh: Mapping[str, Tensor]) -> Iterator[None]:
    """These tensors in place of the model's own."""
    new = {id(tensor): fresh[name] for name, tensor in named(model).items() if name in fresh}
    undo: list[tuple[Any, str, Tensor]] = []
    for module in model.modules():
        for state in (module._parameters, module._buffers):
            for name, tensor in list(state.items()):
                if tensor is not None and id(tensor) in new:
                    undo.append((state, name, tensor))
                    state[name] = new[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for state, name, tensor in undo:
            state[name] = tensor
