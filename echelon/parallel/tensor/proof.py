"""Is a way to split a block right? Tried on copies: the block whole, and split over threads, with the same random weights and inputs.

Outputs, gradients of what came in and gradients of every parameter must be equal, in float64. So names only suggest, and code between
two layers that mixes features (a softmax, a norm) is found out. A block whose forward wants what is not known here is not split.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.group import Lost, Outcome
from echelon.comm.threads import Room, ThreadGroup
from echelon.parallel.building.recipe import stand_ins
from echelon.parallel.tensor.describe import transposed
from echelon.parallel.tensor.layers import taken
from echelon.parallel.tensor.meet import Axis
from echelon.parallel.tensor.names import HEAD_SIZES
from echelon.parallel.tensor.split import Pieces, split
from echelon.parallel.tensor.words import Block, Option

BOUND, ROUGH_BOUND = 1e-5, 1e-3
"""Relative to the largest element, in float64 and in float32. A wrong way differs in the first digits; code that computes a softmax in
float32 whatever it is given differs in the eighth."""
LARGE = 1 << 24
"""Elements of a block above which its copies are in float32."""
BATCH, LENGTH = 2, 4
NUMBERED = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "index", "idx")
"""Attributes in which blocks that are alike differ."""


@dataclass
class Seen:
    """What one call of a block gave."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    problem: str = ""


class Proofs:
    """What was found out about one model's blocks: those that are alike in type, sizes and numbers are tried once."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.size = model, size
        self.known: dict[Any, tuple[int, tuple[str, ...]]] = {}

    def choose(self, block: Block) -> tuple[int, tuple[str, ...]]:
        """The number of the first option that is right, or -1, and names in the block of whole parameters whose gradients are added up.
        Never raises; random states are as before."""
        if block.known or not block.options:
            return (0 if block.known else -1), ()
        key = _likeness(self.model.get_submodule(block.path), block)
        if key not in self.known:
            self.known[key] = -1, ()
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
                for number, option in enumerate(block.options):
                    why, partial = tried(self.model, block, option, self.size)
                    if not why:
                        self.known[key] = number, partial
                        break
        return self.known[key]


def _likeness(owner: nn.Module, block: Block) -> Any:
    """The same for blocks whose code, sizes and numbers are the same."""
    inner = tuple(
        (
            path,
            type(m),
            tuple(
                sorted(
                    (k, v)
                    for k, v in vars(m).items()
                    if type(v) in (int, bool, float, str) and k not in NUMBERED
                )
            ),
        )
        for path, m in owner.named_modules()
    )
    shapes = tuple((name, tuple(p.shape)) for name, p in owner.named_parameters())
    ways = tuple((w.kind, w.path.removeprefix(block.path)) for o in block.options[:1] for w in o.ways)
    return inner, shapes, ways, block.span


def tried(model: nn.Module, block: Block, option: Option, size: int) -> tuple[str, tuple[str, ...]]:
    """(what is wrong with splitting a block so, "" if nothing is; whole parameters whose gradients are to be added up)"""
    try:
        whole, option = _apart(model, block, option)
    except Exception as error:
        return f"it cannot be copied: {error}", ()
    for args in _inputs(whole, whole.get_submodule(option.ways[0].path)):
        expected = _called(whole, args, None)
        if expected.problem or not expected.outputs:
            continue
        again = _called(whole, args, None)
        if not _equal(expected.outputs, again.outputs):
            return "it gives another output each time", ()
        return _compared(whole, option, args, expected, size)
    return "no input was found that it takes", ()


def _apart(model: nn.Module, block: Block, option: Option) -> tuple[nn.Module, Option]:
    """A copy of the block with random weights and no dropout, and the option with paths inside it."""
    owner = model.get_submodule(block.path)
    if block.span:
        owner = nn.Sequential(*[owner.get_submodule(name) for name in block.span])
    large = sum(p.numel() for p in owner.parameters()) > LARGE
    whole = (
        copy.deepcopy(owner, stand_ins(owner)).to("cpu", torch.float32 if large else torch.float64).train()
    )
    for inner in whole.modules():
        for name in [
            n for n, value in vars(inner).items() if type(value) is float and ("drop" in n or n == "p")
        ]:
            setattr(inner, name, 0.0)
    torch.manual_seed(17)
    for param in whole.parameters():
        param.requires_grad_(True)
        fan_in = max(1, math.prod(param.shape[1:]))
        param.data = torch.randn(param.shape, dtype=param.dtype) / fan_in**0.5
    prefix = f"{block.path}." if block.path else ""

    def inside(path: str) -> str:
        name = path.removeprefix(prefix)
        return str(block.span.index(name)) if block.span else name

    return whole, replace(option, ways=tuple(replace(w, path=inside(w.path)) for w in option.ways))


def _inputs(whole: nn.Module, first: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments that a forward of this signature may take, whose first layer is `first`."""
    weight = first._parameters["weight"]
    assert weight is not None
    dtype, space = weight.dtype, weight.dim() - 2
    columns = int(weight.shape[0 if transposed(first) else 1])
    wanted = [
        p
        for p in inspect.signature(whole.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    required = [p.name for p in wanted if p.default is p.empty]
    rotated = [p.name for p in wanted if p.name in required or _rotates(p.name)]
    if not required:
        return
    shapes: list[tuple[int, ...]] = [(BATCH, LENGTH, columns), (BATCH * LENGTH, columns)]
    if space:
        shapes = [(BATCH, columns, *[side] * space) for side in (7, 32)]
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    tables = [m.num_embeddings for m in whole.modules() if isinstance(m, nn.Embedding)]
    if tables:
        made = [torch.randint(0, min(tables), (BATCH, LENGTH)), made[0]]
    head_dim = next(
        (vars(m)[n] for m in whole.modules() for n in HEAD_SIZES if type(vars(m).get(n)) is int), columns
    )
    for names in [required] if rotated == required else [required, rotated]:
        for like in made:
            yield {name: _given(name, like, head_dim) for name in names}


def _rotates(name: str) -> bool:
    return "position_emb" in name or "rotary" in name or "freqs" in name


def _given(name: str, like: Tensor, head_dim: int) -> Any:
    """What a forward may want under this name."""
    if "mask" in name or "past" in name or "cache" in name:
        return None
    if _rotates(name):
        angles = torch.randn(
            1, LENGTH, head_dim, dtype=like.dtype if like.is_floating_point() else torch.float64
        )
        return angles.cos(), angles.sin()
    return torch.arange(LENGTH)[None] if "position" in name else like


def _called(module: nn.Module, args: dict[str, Any], room: Room | None) -> Seen:
    """Forward, and backward of a weighted sum of all that came out."""
    seen = Seen()
    given = {
        name: value.detach().clone().requires_grad_(value.is_floating_point())
        if isinstance(value, Tensor)
        else value
        for name, value in args.items()
    }
    try:
        with torch.enable_grad():
            out = module(**given)
            seen.outputs = [t for t in _tensors(out) if t.is_floating_point()]
            loss = sum((t * _weights(t)).sum() for t in seen.outputs if t.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
        seen.outputs = [t.detach() for t in seen.outputs]
        seen.inputs = [t.grad for t in given.values() if isinstance(t, Tensor)]
        seen.grads = {name: p.grad for name, p in module.named_parameters()}
    except Exception as error:
        seen.problem = f"{type(error).__name__}: {error}"
        if room is not None:
            room.fail(seen.problem)
    for param in module.parameters():
        param.grad = None
    return seen


def _weights(like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, max(1, like.numel()), dtype=like.dtype)[: like.numel()].view(like.shape)


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return [t for value in values for t in _tensors(value)]


def _compared(
    whole: nn.Module, option: Option, args: dict[str, Any], expected: Seen, size: int
) -> tuple[str, tuple[str, ...]]:
    room, one_by_one = Room(size), threading.Lock()
    found: list[tuple[Seen, Pieces]] = [(Seen(problem="not run"), Pieces())] * size

    def rank(group: ThreadGroup) -> None:
        pieces = Pieces()

        def note(outcome: Outcome) -> None:
            raise RuntimeError(outcome.reason if isinstance(outcome, Lost) else "lost")

        try:
            with one_by_one:  # a whole copy is there only until it is cut
                mine = copy.deepcopy(whole)
                split(mine, "", option, Axis(group, note), pieces)
            found[group.rank] = (_called(mine, args, room), pieces)
            by_name = {id(p): n for n, p in mine.named_parameters()}
            pieces.by_param = {hash(by_name[i]): v for i, v in pieces.by_param.items()}
        except Exception as error:
            room.fail(str(error))
            found[group.rank] = (Seen(problem=f"{type(error).__name__}: {error}"), pieces)

    threads = [
        threading.Thread(target=rank, args=(group,), name=f"proof-{group.rank}") for group in room.groups()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cut = set(found[0][1].by_param)
    partial = tuple(
        name
        for name, grad in expected.grads.items()
        if grad is not None and hash(name) not in cut and _adds_up(name, grad, [seen for seen, _ in found])
    )
    return next(
        (why for seen, pieces in found if (why := _difference(seen, expected, pieces, partial))), ""
    ), partial


def _adds_up(name: str, right: Tensor, seen: list[Seen]) -> bool:
    """Do the ranks have parts of this gradient, rather than each all of it?"""
    parts = [part for s in seen if (part := s.grads.get(name)) is not None]
    if len(parts) < len(seen) or any(_equal([part], [right]) for part in parts):
        return False
    return _equal([torch.stack(parts).sum(0)], [right])


def _difference(seen: Seen, expected: Seen, pieces: Pieces, partial: tuple[str, ...]) -> str:
    if seen.problem:
        return seen.problem
    if not _equal(seen.outputs, expected.outputs):
        return "its output is another one"
    if not _equal(seen.inputs, expected.inputs):
        return "the gradient of its input is another one"
    for name, grad in expected.grads.items():
        if name in partial:
            continue
        cut = pieces.by_param.get(hash(name))
        right = taken(grad, cut[1]) if cut is not None and grad is not None else grad
        if not _equal([seen.grads.get(name)], [right]):
            return f"the gradient of {name} is another one"
    return ""


def _equal(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if (x is None) != (y is None):
            return False
        if x is None or not x.numel():
            continue
        bound = BOUND if x.dtype is torch.float64 else ROUGH_BOUND
        if x.shape != y.shape or not bool((x - y).abs().max() <= bound * (1.0 + y.abs().max())):
            return False
    return True


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices, several ranks at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
