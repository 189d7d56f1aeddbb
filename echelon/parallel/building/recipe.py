"""A recorded model: what it is made of, and how each rank makes what it keeps.

Nothing here imports torch's fake tensors: a model that was built plainly is told by the absence of a mark."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Group, Lost
from echelon.errors import PeerLost, UsageError
from echelon.parallel.building.tape import give_back

if TYPE_CHECKING:
    from echelon.parallel.building.recorder import Recorder
    from echelon.parallel.building.tape import Place

AGREE_S = 1800.0
"""The others may still be constructing."""

Keep = Callable[[str, Tensor], Tensor | None]
"""(full name, whole real tensor) -> what this rank keeps of it: itself, a part (a copy of its own), or None for nothing."""


def is_recorded(model: nn.Module) -> bool:
    """Was it built inside `with run.build():` and is not made yet? Then its parameters have shapes and no values."""
    return any(recorder_of(t) is not None for _, t in tensors(model))


def recipe_of(model: nn.Module) -> Recipe:
    """How the tensors of a recorded model are made. Of no use any more once they are."""
    return Recipe(dict(tensors(model)))


def whole(name: str, tensor: Tensor) -> Tensor:
    """A Keep: everything."""
    return tensor


class Recipe:
    """Makes any one tensor of a model by its name, bit-equal to what plain construction gives."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self.tensors = found
        self.nbytes = sum(map(_bytes, self.tensors.values()))
        self.largest = max(map(_bytes, self.tensors.values()), default=0)
        self._together = _sharing(self.tensors)

    def make(self, name: str) -> Tensor:
        """The whole real tensor; the caller frees it. Blocks while it computes. Memory on the way: about this tensor, and what it
        was made from."""
        return self._make([name])[0]

    def digest(self) -> int:
        """The same on ranks that constructed the same: 56 bits over operations, shapes, generators and constants."""
        recorders = {id(r): r for t in self.tensors.values() if (r := recorder_of(t)) is not None}
        real = (t for t in self.tensors.values() if recorder_of(t) is None)
        seen = zlib.crc32(
            b"".join(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for t in real)
        )
        return (sum(r.tape.digest() for r in recorders.values()) + seen) & ((1 << 56) - 1)

    def all(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is wanted, made one after the other, in the order of the model. Tensors of one storage share one."""
        made: dict[str, Tensor] = {}
        for name in self.tensors:
            if not wanted(name):
                continue
            if name not in made:
                group = [n for n in self._together.get(name, [name]) if wanted(n)]
                made.update(zip(group, self._make(group), strict=True))
            yield name, made.pop(name)

    def _make(self, names: list[str]) -> list[Tensor]:
        found = [self.tensors[name] for name in names]
        give_back(max(self.largest, sum(map(_bytes, found))))  # what the caller has freed of those before
        recorder = recorder_of(found[0])
        return [t.detach() for t in found] if recorder is None else recorder.values(found)


def agree(recipe: Recipe, group: Group) -> None:
    """Raises UsageError on every rank of the group if they did not all construct the same: parts of different models make no model."""
    mine = torch.tensor([recipe.digest()], dtype=torch.int64)
    every = torch.zeros(group.size, 1, dtype=torch.int64)
    outcome = group.all_gather(every, mine).wait(Deadline.after(AGREE_S))
    if isinstance(outcome, Lost):
        raise PeerLost(f"a peer was lost before the model was made: {outcome.reason}", peers=outcome.peers)
    odd = [rank for rank, digest in enumerate(every.flatten().tolist()) if digest != every[0].item()]
    if odd:
        raise UsageError(
            f"inside run.build() worker{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} constructed something else than worker 0: "
            "other layers, other constants or other random numbers",
            remedy="Build the same model from the same seed on every worker (no seed by rank): each of them keeps a part of it.",
        )


@torch.no_grad()
def materialise(
    model: nn.Module, keep: Keep = whole, wanted: Callable[[str], bool] = lambda name: True
) -> dict[int, Tensor]:
    """Makes every wanted tensor whole, one at a time, asks `keep` what stays, and puts that into the model.

    Parameters and buffers are then real in the same Python objects, so tied ones stay tied and an optimizer that holds them steps
    them: their requires_grad and the attributes that a script gave them stay. What is not wanted or not kept gets a placeholder:
    its shape, no memory, NaN wherever it is read. Only where a kept tensor is of a class that cannot live in the old object (a
    DTensor) it is a new one: those are given back by the old one's id, for `repoint`."""
    recipe = recipe_of(model)
    replaced: dict[int, Tensor] = {}
    made = recipe.all(wanted)
    for name, old in recipe.tensors.items():
        part = keep(*next(made)) if wanted(name) else None
        if part is None:
            part = placeholder(old)
        new = put(model, old, part)
        if new is not old:
            replaced[id(old)] = new
    give_back(recipe.largest)
    return replaced


@torch.no_grad()
def fill(model: nn.Module, device: torch.device | None = None) -> None:
    """Makes what a model holds now, whatever was done to it since the block: for models that torch has split while they were recorded.
    What torch did not split goes to `device`.

    `fully_shard` and `distribute_tensor` work on recorded parameters, as all that they do is recorded too; a rank then makes its own
    parts alone, in the same objects. Memory on the way: about one whole tensor."""
    for _, tensor in tensors(model):
        if recorder_of(tensor) is not None:
            give_back(_bytes(tensor))
            value = _made(tensor)
            if value is not tensor:
                put(model, tensor, value.to(device))
        elif device is not None and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
    give_back(1 << 20)


def _made(recorded: Tensor) -> Tensor:
    """The real tensor; a DTensor itself, whose part here is real then."""
    recorder, part = recorder_of(recorded), getattr(recorded, "_local_tensor", recorded)
    assert recorder is not None
    (value,) = recorder.values([part])
    if part is recorded:
        return value
    small = value.untyped_storage().nbytes() <= 2 * _bytes(value)
    recorded._local_tensor = value if small else value.clone()  # type: ignore[attr-defined]
    return recorded


def stand_ins(module: nn.Module) -> dict[int, Any]:
    """For copy.deepcopy, which then gives a real module: by their ids, real tensors in place of recorded ones. Parameters are without
    values, buffers have theirs."""
    found: dict[int, Any] = {}
    for _, tensor in tensors(module):
        recorder = recorder_of(tensor)
        if recorder is not None and isinstance(tensor, nn.Parameter):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            found[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        elif recorder is not None:
            found[id(tensor)] = recorder.values([tensor])[0]
    return found


def placeholder(like: Tensor) -> Tensor:
    """Shape, type and device of `like` without memory; whoever reads it gets NaN (whole numbers: the least there is)."""
    kind = like.dtype
    value = (
        float("nan")
        if kind.is_floating_point or kind.is_complex
        else False
        if kind is torch.bool
        else torch.iinfo(kind).min
    )
    return torch.full((), value, dtype=kind, device=like.device).expand(like.shape)


def repoint(optimizer: torch.optim.Optimizer, replaced: dict[int, Tensor]) -> None:
    """The optimizer steps the new parameters in place of the old ones."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in replaced]:
        optimizer.state[replaced[id(old)]] = optimizer.state.pop(old)


@torch.no_grad()
def settle(optimizer: torch.optim.Optimizer) -> None:
    """State that an optimizer made from recorded parameters (Adagrad does when it is constructed) becomes real, cut as it is by now."""
    for state in optimizer.state.values():
        for slot, value in state.items():
            if isinstance(value, Tensor) and recorder_of(value) is not None:
                state[slot] = _made(value)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, each object once, in the order of the model."""
    seen: set[int] = set()
    for found in (model.named_parameters(), model.named_buffers()):
        for name, tensor in found:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def recorder_of(tensor: Tensor) -> Recorder | None:
    """Who recorded it (of a DTensor: its part here); None for a real one."""
    mode = getattr(getattr(tensor, "_local_tensor", tensor), "fake_mode", None)
    return mode if hasattr(mode, "tape") else None


def _sharing(found: dict[str, Tensor]) -> dict[str, list[str]]:
    """Names of tensors that lie in one storage with others, by each name."""
    by_storage: dict[tuple[int, int], list[str]] = {}
    for name, tensor in found.items():
        recorder = recorder_of(tensor)
        if recorder is not None:
            place: Place = recorder.place(tensor)
            by_storage.setdefault((id(recorder), place.storage), []).append(name)
    return {name: names for names in by_storage.values() if len(names) > 1 for name in names}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def put(model: nn.Module, old: Tensor, part: Tensor) -> Tensor:
    """`part` where `old` was, in the same object if that can be."""
    is_parameter = isinstance(old, nn.Parameter)
    new = nn.Parameter(part, requires_grad=old.requires_grad) if is_parameter else part
    recorder = recorder_of(old)
    if recorder is None and type(new) is type(old):
        old.data = part
        return old
    if getattr(old, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            "a parameter of the model has a hook after accumulation that was registered before the parameter was made",
            remedy="Call register_post_accumulate_grad_hook after run.prepare(model); register_hook may be called before.",
        )
    hooks, old._backward_hooks = old._backward_hooks, None
    own = {k: v for k, v in vars(old).items() if recorder is None or k not in recorder.marks}
    if new is part and vars(part):
        new = part.detach()  # somebody's own object: it keeps its attributes
    vars(new).update(own)
    try:
        old.__class__, new.__class__ = type(new), type(old)
    except TypeError:
        return _replace(model, old, new)
    old.__dict__, new.__dict__ = new.__dict__, old.__dict__
    torch._C._swap_tensor_impl(old, new)
    if hooks:
        old._backward_hooks = hooks  # torch keeps them with what has just been exchanged
    return old


def _replace(model: nn.Module, old: Tensor, new: Tensor) -> Tensor:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is old:
                    held[name] = new  # type: ignore[assignment]
    return new
