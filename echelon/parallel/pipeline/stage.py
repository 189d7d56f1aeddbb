"""A stage at work: its nodes run on real tensors, with the parameters of the live model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.parallel.pipeline.contract import MicroBatch, Port
from echelon.parallel.pipeline.defer import Deferring, Later, deferrable
from echelon.parallel.pipeline.lending import WHOLE, Lending
from echelon.parallel.pipeline.plan import Plan, Plans, Stretch
from echelon.parallel.pipeline.record import Leaf, Named, Node, SetBuffer, Value, swap, tensors_of

Env = dict[int, Tensor]


@dataclass
class Kept:
    """What backward needs of one micro-batch, beside what autograd keeps."""

    leaves: Env = field(default_factory=dict)
    """What was taken, where gradients end."""

    roots: Env = field(default_factory=dict)
    """What was given, where gradients begin."""

    loss: Tensor | None = None
    later: Later = field(default_factory=Later)


class ModelStage:
    """The Stage of a model that was recorded and cut. `begin` gives it the micro-batches of a step."""

    def __init__(
        self, model: nn.Module, plans: Plans, index: int, *, defer: bool = False, lent: Lending = WHOLE
    ) -> None:
        """`defer`: weight gradients are left for `weights`, as far as defer.py can. `lent`: who brings the parameters."""
        self.model, self.plans, self.index, self.defer = model, plans, index, defer
        self.lent = lent
        self.losses: dict[int, Tensor] = {}
        """The last stage's losses, detached, of this step's micro-batches."""
        self._micros: Sequence[MicroBatch] = ()
        self._loss_fn: Callable[[Any, Any], Tensor] | None = None
        self._kept: dict[int, Kept] = {}
        self._of: dict[int, Plan] = {}
        self._alike: dict[int | None, Plan] = {}
        """By the rows of a micro-batch."""
        self._mode: Hashable = None
        """The model's, for all micro-batches of a step."""
        self._deferrable: dict[int, tuple[Plan, frozenset[str]]] = {}

    def begin(self, micros: Sequence[MicroBatch], loss_fn: Callable[[Any, Any], Tensor]) -> None:
        """A new step: forgets the last one."""
        self.drop()
        self._micros, self._loss_fn = micros, loss_fn

    def plan(self, micro: int) -> Plan:
        found = self._of.get(micro)
        if found is None:
            batch = self._micros[micro]
            found = self._alike.get(batch.rows)
            if found is None or batch.rows is None:
                self._mode = self._mode or self.plans.records.now()
                found = self._alike[batch.rows] = self.plans.of(batch, self._mode)[self.index]
            self._of[micro] = found
        return found

    def takes(self, micro: int) -> Sequence[Port]:
        return self.plan(micro).takes

    def gives(self, micro: int) -> Sequence[Port]:
        return self.plan(micro).gives

    @property
    def held(self) -> int:
        """Micro-batches of which something is kept."""
        return len(self._kept)

    def forward(self, micro: int, taken: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Inputs and what was taken, then the nodes, then the loss if this is the last stage."""
        plan, batch, kept = self.plan(micro), self._micros[micro], Kept()
        env: Env = {}
        for number, tensor in zip(
            plan.record.inputs, tensors_of((batch.args, dict(batch.kwargs))), strict=True
        ):
            if number in plan.inputs:
                env[number] = tensor.clone() if number in plan.written else tensor
        for port in plan.takes:
            tensor = _laid_out(taken[port.value].detach(), plan.record.values[port.value].stride)
            if port.grad and torch.is_grad_enabled():
                kept.leaves[port.value] = tensor.requires_grad_()
            env[port.value] = tensor.clone() if port.value in plan.written else tensor
        live = {name: _state(self.model, name) for name in plan.names}
        put_off = self._put_off(plan, kept.later) if self.defer else None
        with self.lent.forward(self.index):
            for stretch in plan.stretches:
                _run(self.model, stretch, env, live, put_off, self.lent)
        if plan.last:
            assert self._loss_fn is not None
            loss = self._loss_fn(_filled(plan.record.output, env, live), batch.target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                given = (
                    f"a tensor of shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                raise UsageError(
                    f"the loss function gave {given}, and a loss is one number",
                    remedy="Take the mean over samples, or the sum with loss=sum.",
                )
            self.losses[micro] = (
                loss.detach().clone()
            )  # a mean may lie in memory of the size of what it was taken of
            kept.loss = loss
        kept.roots = {port.value: env[port.value] for port in plan.gives if port.grad}
        if torch.is_grad_enabled():
            self._kept[micro] = kept
        return {port.value: env[port.value].detach() for port in plan.gives}

    def backward(self, micro: int, grads: Mapping[Port, Tensor]) -> Mapping[Port, Tensor]:
        plan, kept = self.plan(micro), self._kept[micro]
        sums: Env = {}
        for port in plan.gives:
            if port.grad:
                grad = grads[port]
                sums[port.value] = sums[port.value] + grad if port.value in sums else grad
        roots = [tensor for number, tensor in kept.roots.items() if tensor.requires_grad]
        starts = [sums[number] for number, tensor in kept.roots.items() if tensor.requires_grad]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            starts.append(torch.full_like(kept.loss, self._micros[micro].weight))
        with self.lent.backward(self.index):
            if roots:
                torch.autograd.backward(roots, starts)
        back: dict[Port, Tensor] = {}
        for port in plan.takes:
            if port.grad:
                leaf = kept.leaves[port.value]
                back[port] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        if kept.later.todo:
            self._kept[micro] = Kept(later=kept.later)
        else:
            del self._kept[micro]
        return back

    def put_off_bytes(self, micro: int) -> int:
        """What is kept of a micro-batch for `weights`."""
        kept = self._kept.get(micro)
        return kept.later.num_bytes if kept is not None else 0

    def weights(self, micro: int) -> None:
        kept = self._kept.pop(micro, None)
        with self.lent.weights(self.index):
            if kept is not None:
                kept.later.run()

    def drop(self) -> None:
        self._kept.clear()
        self._of.clear()
        self._alike.clear()
        self.losses.clear()
        self._micros, self._mode = (), None

    def _put_off(self, plan: Plan, later: Later) -> Deferring:
        known = self._deferrable.get(id(plan))
        if known is None or known[0] is not plan:
            nodes = tuple(node for stretch in plan.stretches for node in stretch.nodes)
            known = self._deferrable[id(plan)] = (plan, deferrable(self.model, nodes))
        found = (_state(self.model, name) for name in known[1])
        return Deferring(later, {id(parameter) for parameter in found if type(parameter) is nn.Parameter})


def _run(
    model: nn.Module, stretch: Stretch, env: Env, live: Mapping[str, Tensor], put_off: Deferring | None, lent: Lending
) -> None:  # fmt: skip
    """One stretch under its setting. One that is computed again in backward works on values of its own."""
    if stretch.setting.region >= 0 and torch.is_grad_enabled():
        from torch.utils.checkpoint import checkpoint

        def again(*values: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip(stretch.needs, values, strict=True))
            lent.need(
                stretch.names
            )  # all of it: autograd keeps what is computed again, and asks for none of it
            _go(model, stretch, own, live, put_off, WHOLE)
            return tuple(own[number] for number in stretch.leaves)

        made = checkpoint(again, *(env[number] for number in stretch.needs), use_reentrant=False)
        env.update(zip(stretch.leaves, made, strict=True))
        for number in (number for dead in stretch.dead for number in dead):
            env.pop(number, None)
        return
    _go(model, stretch, env, live, put_off, lent)


def _go(
    model: nn.Module, stretch: Stretch, env: Env, live: Mapping[str, Tensor], put_off: Deferring | None, lent: Lending
) -> None:  # fmt: skip
    with _under(stretch, put_off):
        for node, dead in zip(stretch.nodes, stretch.dead, strict=True):
            if node.names:
                lent.need(node.names)
            step(model, node, env, live)
            if node.names and not isinstance(node.call, (Leaf, SetBuffer)):
                lent.made([env[number] for number in node.gives if number in env], node.names)
            for number in dead:
                env.pop(number, None)


@contextlib.contextmanager
def _under(stretch: Stretch, put_off: Deferring | None) -> Any:
    with contextlib.ExitStack() as stack:
        if not stretch.setting.grad:
            stack.enter_context(torch.no_grad())
        for kind, enabled, dtype in stretch.setting.autocast or ():
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        if put_off is not None:
            stack.enter_context(put_off)
        yield


def step(model: nn.Module, node: Node, env: Env, live: Mapping[str, Tensor]) -> None:
    """One node: its call on what stands for its arguments."""
    if node.flat:
        args: Any = [
            env[a.number] if type(a) is Value else live[a.name] if type(a) is Named else a for a in node.args
        ]
        kwargs = node.kwargs
    else:
        args, kwargs = _filled((node.args, node.kwargs), env, live)
    if isinstance(node.call, SetBuffer):
        path, _, name = node.call.path.rpartition(".")
        setattr(model.get_submodule(path), name, args[0].detach())
        return
    call = model.get_submodule(node.call.path) if isinstance(node.call, Leaf) else node.call
    result = call(*args, **kwargs)
    made = (result,) if isinstance(result, Tensor) else tensors_of(result)
    for number, tensor in zip(node.outs, made, strict=True):
        if number is not None:
            env[number] = tensor
    for old, new in node.renames:
        env[new] = env[old]


def _state(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name, as it is now."""
    path, _, attribute = name.rpartition(".")
    found = getattr(model.get_submodule(path), attribute)
    assert isinstance(found, Tensor)
    return found


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor as it lay where it was made: whether a later call copies or not, and how it sums, may depend on that."""
    if tensor.stride() == stride:
        return tensor
    if 0 in stride:  # expanded: the same numbers again and again
        first = [slice(0, 1) if step == 0 else slice(None) for step in stride]
        return tensor[tuple(first)].expand(tensor.shape)
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _filled(tree: Any, env: Env, live: Mapping[str, Tensor]) -> Any:
    return swap(
        lambda ref: env[ref.number] if isinstance(ref, Value) else live[ref.name], tree, (Value, Named)
    )
