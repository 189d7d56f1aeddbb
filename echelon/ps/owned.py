"""A model of which every worker has its own copy (update=local), as a worker sees it: what it brings to meetings and takes from
them. The verbs are those of ps/local.py; placement and memory are those of Held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.ps.held import Call, Held
from echelon.ps.keys import Holder
from echelon.ps.local import NAME
from echelon.ps.meetings import Place
from echelon.ps.recipes import Recipe
from echelon.ps.worker import Servers


class Owned(Held):
    """`params` are trained; `moments` gives what is only averaged, by name, as it is now. Each worker calls the same in the same order,
    but for add()."""

    def __init__(
        self,
        servers: Servers,
        model: int,
        params: Sequence[tuple[str, Tensor]],
        moments: Callable[[], Mapping[str, Tensor]],
        rank: int,
        recipe: Recipe | None,
    ) -> None:
        self.moments, self.recipe = moments, recipe
        self.kinds = dict.fromkeys(moments(), "mean")
        super().__init__(servers, model, [*params, *moments().items()], rank)
        self.deltas: list[Tensor] = []
        """By server: room for how far this worker went (geo)."""

    def follow(self) -> None:
        self.params.update(self.moments())
        super().follow()

    def open(self, momentum: Mapping[str, Tensor] | None = None) -> None:
        """The values are worker 0's, and the outer optimizer's momentum, if it had one. Blocks until all workers have opened."""
        self.follow()
        self.gather()
        had = self._laid(momentum) if momentum and self.rank == 0 else []
        calls = []
        for index, link in enumerate(self.servers.links):
            held = self.placement.held_by(Holder("server", index))
            ranges = [
                [r.offset_bytes, r.numel, r.tensor.dtype, self.kinds.get(r.tensor.name, "outer")]
                for r in held
            ]
            head = {
                "model": self.model,
                "ranges": ranges,
                "rule": self.recipe.to_plain() if self.recipe else None,
            }
            payload = [self.pulled[index], *had[index : index + 1]] if self.rank == 0 else []
            calls.append(link.call(f"{NAME}.open", head, payload))
        self.servers.wait(calls, "opening a model on the servers")

    # -- meetings --------------------------------------------------------------------------------------------------

    def meet(self, number: int, count: int, place: Place) -> list[Call]:
        """This worker's copy, which weighs `count` samples, to a meeting of all. taken() makes it what was agreed on."""
        self.follow()
        if count:
            self.gather()
        head = {"model": self.model, "number": number, "count": count, "place": place.to_plain()}
        return [
            link.call(f"{NAME}.meet", head, [x] if count else [], out=[x])
            for link, x in zip(self.servers.links, self.pulled, strict=True)
        ]

    @torch.no_grad()
    def mend(self) -> list[str]:
        """What is only averaged and is not finite becomes what was agreed on last. Gives the parameters that are not finite: with one, this
        copy must not meet others, and taken() makes it what was agreed on last."""
        self.follow()
        wrong: list[str] = []
        for r, live, before in zip(self.placement.ranges, *self._pairs, strict=True):
            if not bool(torch.isfinite(live.sum())) and not bool(torch.isfinite(live).all()):
                if r.tensor.name in self.kinds:
                    live.copy_(before)
                else:
                    wrong.append(r.tensor.name)
        return list(dict.fromkeys(wrong))

    @torch.no_grad()
    def add(self, place: Place) -> list[Call]:
        """How far this worker went since it last took values; taken() makes its copy what the servers have then."""
        self.follow()
        self.deltas = self.deltas or [x.zero_() for x in self.rooms()]
        live, before = self._pairs
        torch._foreach_copy_(self._views(self.deltas), live)
        torch._foreach_sub_(self._views(self.deltas), before)
        head = {"model": self.model, "place": place.to_plain()}
        rooms = zip(self.servers.links, self.deltas, self.pulled, strict=True)
        return [link.call(f"{NAME}.add", head, [delta], out=[x]) for link, delta, x in rooms]

    def await_all(self, place: Place) -> list[Call]:
        """This worker waits for the others; taken() then gives it what the servers have."""
        head = {"model": self.model, "place": place.to_plain()}
        pulls = zip(self.servers.links, self.pulled, strict=True)
        return [link.call(f"{NAME}.gather", head, out=[x]) for link, x in pulls]

    def taken(self) -> None:
        """What the last calls brought becomes this worker's copy."""
        self.swap_in()

    # -- state of the outer optimizer ------------------------------------------------------------------------------

    def momentum(self) -> dict[str, Tensor]:
        """Of each parameter; {} where the outer optimizer has none. Any worker may ask, between meetings."""
        calls = [link.call(f"{NAME}.state", {"model": self.model}) for link in self.servers.links]
        found: dict[str, Tensor] = {}
        replies = self.servers.wait(calls, "the state of the outer optimizer")
        for index, reply in enumerate(replies):
            for r in self.placement.held_by(Holder("server", index)) if reply.tensors else ():
                if r.tensor.name not in self.kinds:
                    dtype = getattr(torch, r.tensor.dtype)
                    whole = found.setdefault(r.tensor.name, torch.zeros(r.tensor.numel, dtype=dtype))
                    memory = reply.tensors[0][r.offset_bytes : r.offset_bytes + r.nbytes]
                    whole[r.begin : r.end].copy_(memory.view(dtype))
        return found

    def _laid(self, momentum: Mapping[str, Tensor]) -> list[Tensor]:
        """By server: momentum() laid out as the values are; what it does not know has none."""
        rooms = [torch.zeros_like(x) for x in self.pulled]
        for r, view in zip(self.placement.ranges, self._views(rooms), strict=True):
            if r.tensor.name in momentum:
                view.copy_(momentum[r.tensor.name].view(-1)[r.begin : r.end])
        return rooms

    def _views(self, rooms: Sequence[Tensor]) -> list[Tensor]:
        """Each range's place in these, in the order of keys."""
        return [
            rooms[r.holder.rank][r.offset_bytes : r.offset_bytes + r.nbytes].view(
                getattr(torch, r.tensor.dtype)
            )
            for r in self.placement.ranges
        ]


def outer_recipe(outer: str, lr: float, momentum: float) -> Recipe | None:
    """The outer optimizer: SGD with Nesterov momentum for diloco, none where copies are averaged or added."""
    if outer != "diloco":
        return None
    numbers: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return Recipe("sgd", numbers)
