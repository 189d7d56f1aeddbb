"""Columns of a table on several workers: what becomes of the model that reads them, and how run.step and run.evaluate reach it.

Every worker keeps the first layer's weights of its own columns. The worker that owns the labels keeps all the rest, runs it and takes
the loss; the others have placeholders. See docs/vertical.md and parallel/columns.py.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.build import World
from echelon.comm.group import Lost, Outcome
from echelon.data import tree
from echelon.data.columns import Columns, columns_of
from echelon.data.sides import Sides, Told, sides, whole
from echelon.errors import LoopError, PeerLost, StrategyError, UsageError
from echelon.mesh.layout import Placed
from echelon.parallel import elementwise
from echelon.parallel.building.recipe import placeholder
from echelon.parallel.columns import First, Mark, Wire, runs_of
from echelon.parallel.exchange import Exchange
from echelon.parallel.pipeline.placing import Seat, keep
from echelon.prepare import model as models
from echelon.prepare.evaluate import Judge
from echelon.step import Machine
from echelon.strategy import Strategy

if TYPE_CHECKING:
    from echelon.prepared import Prepared

LossFn = Callable[[Any, Any], Tensor]


class _Given(BaseException):
    """This worker gave its part, and the model goes on elsewhere: unwinds a script's own function on workers without labels."""


class Tables:
    """What of a run's data lies in columns. One a run; every rank calls the same in the same order."""

    def __init__(self, strategy: Strategy, world: World, machine: Machine) -> None:
        self.strategy, self.world, self.machine = strategy, world, machine
        self.sides: Sides | None = None
        """How the columns lie; None where all of them are here."""
        self.of: tuple[str, ...] = ()
        self.models: dict[int, Vertical] = {}
        self._met: list[Columns] = []

    def meet(self, objects: Sequence[Any], prepared: Sequence[nn.Module]) -> None:
        """Workers tell each other of the columns behind these loaders and datasets. UsageError, on all of them, where they make no table."""
        for columns in filter(None, map(columns_of, objects)):
            if any(columns is known for known in self._met):
                continue
            self._met.append(columns)
            found = self._sides(columns)
            if found is None:
                continue
            self._allowed()
            if self.sides is None and prepared:
                raise UsageError(
                    "this loader's columns lie on several workers, and the model was prepared before it",
                    remedy="Prepare them together: model, optimizer, loader = run.prepare(model, optimizer, loader).",
                )
            if self.sides not in (None, found) or self.of not in ((), columns.of):
                raise UsageError(
                    "two tables whose columns lie differently on the workers",
                    remedy="One model reads one table: give all Columns the same `of`, and each worker the same names.",
                )
            self.sides, self.of = found, columns.of

    def _sides(self, columns: Columns) -> Sides | None:
        mine, group = columns.told(), self.world.tensor
        if not group.local:
            return sides(_every(mine, Exchange(group, _raise)), columns.of)
        if not whole(mine, columns.of):
            what = (
                f"{len(mine.names)} of {len(columns.of)} columns and {'the' if mine.labels else 'no'} labels"
            )
            raise UsageError(
                f"worker {self.world.rank} has {what} of the table, and nobody to share them with",
                remedy="Columns on several workers go with a tensor axis over all of them: echelon run --workers 3 --strategy tensor=3 "
                "where there are three files.",
            )
        return None

    def _allowed(self) -> None:
        strategy, size = self.strategy, self.world.size
        if self.world.tensor.size != size or strategy.form != "allreduce" or strategy.precision != "fp32":
            raise StrategyError(
                f"columns on several workers go with tensor={size} alone, in full precision, and this is {strategy}",
                remedy=f"Start it with --workers {size} --strategy tensor={size}.",
            )

    def split(self, prepared: Prepared, model: nn.Module) -> bool:
        """The model becomes what this worker keeps of it. False where the columns are all here."""
        if self.sides is None:
            return False
        made = Vertical(model, self.sides, len(self.of), self.world, self.machine)
        made.place(prepared)
        self.models[id(model)] = made
        return True

    def mine(
        self, fresh: list[tuple[str, nn.Parameter, bool]], placed: Mapping[int, Placed]
    ) -> list[tuple[str, nn.Parameter, bool]]:
        """Those of a model's parameters that this worker trains."""
        return [entry for entry in fresh if self.sides is None or placed[id(entry[1])].runs]

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """State that it made before becomes that of what is here. StrategyError for one that needs whole parameters."""
        for model in self.models.values():
            model.split_state(optimizer)

    def judged(self, model: nn.Module, fn: Judge, exchange: Exchange) -> tuple[Judge, Exchange]:
        """run.evaluate's function and where its totals meet: only the owner of the labels has some."""
        found = self.models.get(id(model))
        return (
            (fn, exchange) if found is None else (found.judged(fn), Exchange(self.world.tensor, found.lost))
        )

    def lines(self) -> list[str]:
        return [self.sides.line()] if self.sides is not None else []


def _every(mine: Told, exchange: Exchange) -> list[Told]:
    data = torch.tensor(list(mine.text().encode()), dtype=torch.uint8)
    counts, joined = exchange.rows(data, len(data))
    return [Told.read(bytes(piece.tolist()).decode()) for piece in joined.split(counts)]


def _raise(outcome: Outcome) -> None:
    if isinstance(outcome, Lost):
        raise PeerLost(f"a peer was lost while columns were compared: {outcome.reason}", peers=outcome.peers)


class Vertical:
    """One model. Every rank calls the same in the same order."""

    def __init__(self, model: nn.Module, sides: Sides, width: int, world: World, machine: Machine) -> None:
        self.model, self.world, self.machine = model, world, machine
        self.columns, self.owner = sides.columns[world.rank], sides.owner
        self.wire = Wire(world.tensor, sides.owner, self.lost)
        self.loss_dtype = torch.float32
        self.name, self.layer = _reader(models.unwrapped(model), width)
        self.first = First(self.layer, self.name, len(self.columns), self.wire)
        self.shape = (self.layer.out_features, width)
        self.calls = 0
        self._inside = False
        models.Override(model, "forward", self._forward)

    def lost(self, outcome: Outcome) -> None:
        """It is found at the script's step."""
        self.machine.side_losses.append(outcome)

    # -- what is here ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def place(self, prepared: Prepared) -> None:
        """Keeps this worker's part of the model's tensors, and says what that is."""
        rank, placed, user = self.world.rank, prepared.placed, models.unwrapped(self.model)
        weight = self.layer.weight
        weight.grad = None
        runs = runs_of(self.columns, self.shape) if self.columns else ()
        weight.data = weight.data[:, list(self.columns)].clone() if runs else placeholder(weight.data)
        placed[id(weight)] = Placed(self.shape, runs, (rank,), counts=bool(runs))
        tensors = [*user.named_parameters(), *user.named_buffers()]
        users = {name: (rank,) if tensor is weight else (self.owner,) for name, tensor in tensors}
        keep(user, users, Seat(frozenset({rank}), {r: [r] for r in range(self.world.size)}), placed)
        prefix = f"model{len(prepared.models)}/" if prepared.models else ""
        for name, buffer in user.named_buffers():
            prepared.placed_buffers[prefix + models.plain_name(name)] = placed.pop(id(buffer))

    @torch.no_grad()
    def split_state(self, optimizer: torch.optim.Optimizer) -> None:
        kind, weight = type(optimizer), self.layer.weight
        mine = {id(p) for p in self.model.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return
        if why := elementwise.looks_at_whole(kind.__name__, kind.__module__):
            raise StrategyError(
                f"{kind.__name__} with columns on several workers: {why}, and here each worker has a piece",
                remedy="Use an optimizer that steps element by element (SGD, AdamW, …).",
            )
        for param, state in list(optimizer.state.items()):
            if param is weight and self.columns:
                for key, value in state.items():
                    if isinstance(value, Tensor) and tuple(value.shape) == self.shape:
                        state[key] = value[:, list(self.columns)].clone()
            elif id(param) in mine and (param is weight or not self.wire.owns):
                del optimizer.state[param]

    # -- a step, and evaluation -----------------------------------------------------------------------------------

    def step(self, loss_fn: LossFn, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        """Forward and backward: what is here of them. Gives the owner's loss on every worker, in float64; `loss_dtype` is the script's."""
        told = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        if self.wire.owns:
            with self._calling():
                loss = loss_fn(self.model(*args, **kwargs), target)
            loss.backward()
            if self.first.owes:  # the loss does not depend on the model, and the others wait
                self.first.answer(self.layer.weight.new_zeros(self.first.mark.rows, self.shape[0]))
            told[0], told[1] = loss.detach().double(), _DTYPES.index(loss.dtype)
        else:
            part = self._give(args, kwargs)
            if self.layer.weight.requires_grad:
                part.backward(self.wire.hear(part))
        for sync in self.machine.syncs:
            sync.activity += 1  # a worker may have nothing to train, and was trained on
        loss_there, dtype = self.wire.tell(told).unbind()
        self.machine.counters.times.pipe_s += self.wire.waited_s
        self.wire.waited_s = 0.0
        self.loss_dtype = _DTYPES[int(dtype)]
        return loss_there

    def judged(self, fn: Judge) -> Judge:
        """The script's function, which workers without labels leave where they gave their part."""

        def judge(model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
            with self._calling():
                try:
                    return fn(model, batch)
                except _Given:
                    return {}

        return judge

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Inside, the model is called: once, and by all workers."""
        self._inside = True
        try:
            yield
        finally:
            self._inside, self.first.given = False, None

    def _forward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                raise LoopError(
                    "the columns that this model reads lie on several workers, and the script called it by itself",
                    remedy="Write loss = run.step(loss_fn, (inputs, target)) to train and run.evaluate(model, loader, fn) to evaluate: "
                    "they do the same under every strategy.",
                )
            if not self.wire.owns:
                self._give(args, kwargs)
                raise _Given
            self._begin(args, kwargs)
            return inner(*args, **kwargs)

        return forward

    def _give(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        part = self.first.part(self._begin(args, kwargs))
        self.wire.give(part, self.first.mark)
        return part

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """A forward begins: its mark, and the columns that the model was given."""
        given = tree.tensors((args, dict(kwargs)))
        if len(given) != 1:
            raise UsageError(
                f"the model got {len(given)} tensors, and the columns of a table are one",
                remedy="Give run.step a batch (inputs, target) of Columns.",
            )
        self.calls += 1
        current = self.machine.current
        ids = current.part.micro.ids if current is not None and current.part is not None else ()
        first = self.first
        first.mark = Mark(self.calls, len(given[0]), zlib.crc32(repr(list(ids)).encode()) if ids else 0)
        first.given, first.used, first.owes = given[0], False, False
        return given[0]


class _Found(BaseException):
    """Ends a forward that was begun to see where its input goes."""


@torch.no_grad()
def _reader(model: nn.Module, width: int) -> tuple[str, nn.Linear]:
    """The linear layer that gets the model's input: seen in the beginning of a forward, of two rows of zeros."""
    param = next(model.parameters(), None)
    given = torch.zeros(
        2, width, dtype=param.dtype if param is not None else None, device=getattr(param, "device", None)
    )
    found: list[tuple[str, nn.Linear]] = []

    def watch(name: str, layer: nn.Linear) -> Any:
        def see(module: nn.Module, args: Any) -> None:
            if args and args[0] is given:
                found.append((name, layer))
                raise _Found

        return layer.register_forward_pre_hook(see)

    modes = [(module, module.training) for module in model.modules()]
    hooks = [watch(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        with torch.random.fork_rng(devices=[]):
            model.eval()(given)
    except _Found:
        pass
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    if not found or found[0][1].in_features != width:
        what = f"reads {found[0][1].in_features} inputs" if found else "gets the model's input as it is"
        raise UsageError(
            f"{'the first layer' if found else 'no linear layer of the model'} {what}, and the table has {width} columns on several workers",
            remedy=f"Begin the model's forward with nn.Linear({width}, …) on its input, one for each name in Columns(…, of=…), as in one process. "
            "Scale and clean columns in the data set, on the worker that has them.",
        )
    return found[0]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
