"""A model whose layers are shared by the workers of the tensor axis: planned, proved, split, and told where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Outcome
from echelon.errors import PeerLost, StrategyError
from echelon.mesh.axes import Mesh
from echelon.mesh.layout import Placed, Runs
from echelon.parallel import elementwise
from echelon.parallel.tensor import clipping, describe, plan, proof, text
from echelon.parallel.tensor.blocks import WORTH
from echelon.parallel.tensor.guard import Guard
from echelon.parallel.tensor.layers import taken
from echelon.parallel.tensor.meet import Axis
from echelon.parallel.tensor.split import Pieces, guarded, no_shortcuts, split
from echelon.parallel.tensor.words import Block, Option

PROOF_LIMIT_S = 1800.0


@dataclass
class Shared:
    """What was split of one model."""

    chosen: list[tuple[Block, Option | None]] = field(default_factory=list)
    """Every block with the way that was taken; None where it is whole."""
    whole: dict[str, str] = field(default_factory=dict)
    """Layers that could have been split, and why they are not."""
    pieces: Pieces = field(default_factory=Pieces)
    elements: int = 0
    """Of all parameters, whole."""
    here: int = 0
    """Of all parameters, on this rank."""
    size: int = 1
    alone: bool = True
    """Nobody shares the model."""
    axis: Axis | None = None
    """Those who do."""

    def lines(self) -> list[str]:
        """For people: what is split how, and what is not and why."""
        return text.lines(self.chosen, self.whole, self.size)

    def summary(self) -> str:
        return text.summary(self.chosen, self.elements, self.here, self.size)


def share(
    model: nn.Module,
    group: Group,
    everyone: Group,
    lost: Callable[[Outcome], None],
    overrides: str = "",
    padding: bool = False,
    worth: int = WORTH,
    staged: bool = False,
    reads: Group | None = None,
) -> Shared:
    """Splits `model`, which is whole and the same on every rank, over `group`. All ranks of the run (`everyone`) call this; the first
        one looks for proofs. StrategyError, on all of them, where it cannot be split as asked. `staged`: the model is then cut into stages, maybe
    within a block. `reads`: a second group of the same ranks, for outputs that are gathered when they are read; without it they are gathered at once."""
    numel = sum(p.numel() for p in model.parameters())
    if group.local:
        return Shared(elements=numel, here=numel)
    blocks, whole = plan.plan(
        describe.nodes(model), group.size, overrides, padding and not staged, worth, even=staged
    )
    found = _proved(model, blocks, group.size, everyone)
    shared = Shared(whole=whole, elements=numel, size=group.size, alone=False)
    axis = shared.axis = Axis(group, lost, streams=not staged, reads=None if staged else reads)
    for block, (number, partial) in zip(blocks, found, strict=True):
        option = Option(block.alone) if block.alone else None
        if number >= 0:
            at = f"{block.path}." if block.path else ""
            option = replace(block.options[number], partial=tuple(at + name for name in partial))
        shared.chosen.append((block, option))
        if option is not None:
            split(model, block.path, option, axis, shared.pieces)
    no_shortcuts(model)
    model.register_forward_pre_hook(axis.next_pass)
    clipping.watch((param for param, _ in shared.pieces.by_param.values()), axis)
    if names := guarded(model, shared.pieces):
        Guard(model, names)
    shared.here = sum(p.numel() for p in model.parameters())
    return shared


@activity.named("finding out how to split the model")
def _proved(model: nn.Module, blocks: list[Block], size: int, everyone: Group) -> list[tuple[int, list[str]]]:
    """For each block the number of the option that is right, and its partial parameters. One rank tries, all hear of it: they must split
    alike."""
    names = [[name for name, _ in _parameters(model, block)] for block in blocks]
    words: list[int] = []
    proofs = proof.Proofs(model, size)
    for block, known in zip(blocks, names, strict=True):
        number, partial = proofs.choose(block) if everyone.rank == 0 else (-1, ())
        words += [number, *(int(name in partial) for name in known)]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    told = torch.tensor(words, dtype=torch.int64, device=device)
    outcome = everyone.broadcast(told).wait(Deadline.after(PROOF_LIMIT_S))
    if isinstance(outcome, Lost):
        raise PeerLost(f"a peer was lost while the model was split: {outcome.reason}", peers=outcome.peers)
    heard = iter(told.tolist())
    return [(next(heard), [name for name in known if next(heard)]) for known in names]


def _parameters(model: nn.Module, block: Block) -> list[tuple[str, nn.Parameter]]:
    return list(model.get_submodule(block.path).named_parameters()) if not block.span else []


def placed(shared: Shared, params: Iterable[Tensor], mesh: Mesh, rank: int) -> dict[int, Placed]:
    """Where every parameter of the model lies, by its id."""
    if shared.alone:
        return {}
    at = mesh.coordinates(rank)
    alike = tuple(r for r in range(mesh.size) if mesh.coordinates(r)["tensor"] == at["tensor"])
    everybody = tuple(range(mesh.size))  # a pipeline then says who keeps what of it
    found: dict[int, Placed] = {}
    for param in params:
        piece = shared.pieces.of(param)
        if piece is not None:
            found[id(param)] = Placed(piece.shape, piece.runs, alike)
        else:
            shape = tuple(param.shape)
            found[id(param)] = Placed(shape, (Runs(0, param.numel()),), everybody, at["tensor"] == 0)
    return found


def placed_buffers(shared: Shared, mesh: Mesh, rank: int) -> dict[str, Placed]:
    """Where buffers lie that are split, by their names in the model."""
    if shared.alone:
        return {}
    at = mesh.coordinates(rank)["tensor"]
    alike = tuple(r for r in range(mesh.size) if mesh.coordinates(r)["tensor"] == at)
    return {name: Placed(piece.shape, piece.runs, alike) for name, piece in shared.pieces.buffers.items()}


@torch.no_grad()
def split_state(optimizer: torch.optim.Optimizer, pieces: Pieces, warn: Callable[[str], None]) -> None:
    """State that an optimizer made before its parameters were split becomes that of the pieces. StrategyError for one that needs whole
    parameters."""
    if not any(pieces.of(p) is not None for group in optimizer.param_groups for p in group["params"]):
        return
    kind = type(optimizer)
    if why := elementwise.looks_at_whole(kind.__name__, kind.__module__):
        raise StrategyError(
            f"{kind.__name__} with a tensor axis: {why}, and here each worker has a piece",
            remedy="Use an optimizer that steps element by element (SGD, AdamW, …), or another form: data parallel or pipeline.",
        )
    if not elementwise.is_known(kind.__name__, kind.__module__):
        warn(
            f"{kind.__name__} steps on pieces of parameters (tensor axis). That is right if it steps each element by itself, "
            "and wrong if it looks at norms or rows of whole parameters."
        )
    for param, state in optimizer.state.items():
        piece = pieces.of(param)
        for key, value in state.items() if piece is not None else ():
            if isinstance(value, Tensor) and piece is not None and tuple(value.shape) == piece.shape:
                state[key] = taken(value, piece)
