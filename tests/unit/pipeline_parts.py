"""A model for tests of the pipeline's runtime: stages written by hand, beside the same model in one process.

Stage s makes value s of value s - 1. With `skip`, stage 2 takes value 0 as well. With `odd`, the first stage also gives the last one
whole numbers (value 100, no gradient) and an empty tensor (value 101).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.clock import Deadline
from echelon.comm.group import Lost
from echelon.parallel.pipeline.contract import Port
from echelon.parallel.pipeline.runtime import Ran, Runtime

WIDTH = 6
SOON_S = 30.0


class Net(nn.Module):
    def __init__(self, stages: int, skip: bool = False, odd: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(width, width).double() for _ in range(stages))
        self.skip, self.odd, self.width = skip, odd, width

    def run(self, stage: int, x: Tensor, first: Tensor | None, scale: Tensor | None) -> Tensor:
        x = self.layers[stage](x).tanh()
        x = x + 0.5 * first if first is not None else x
        return x * scale[:, None] if scale is not None else x

    def forward(self, x: Tensor) -> Tensor:
        first = scale = None
        for stage in range(len(self.layers)):
            last = stage == len(self.layers) - 1
            y = self.run(stage, x, first if self.skip and stage == 2 else None, scale if last else None)
            first = y if stage == 0 else first
            scale = whole_numbers(y) if stage == 0 and self.odd else scale
            x = y
        return x


def whole_numbers(x: Tensor) -> Tensor:
    return (x.detach()[:, 0] > 0).long() + 1


class Part:
    """A Stage of a Net."""

    def __init__(self, net: Net, index: int, micros: list[tuple[Tensor, Tensor, float]], apart: bool) -> None:
        self.net, self.index, self.micros, self.apart = net, index, micros, apart
        self.last = index == len(net.layers) - 1
        self.kept: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]] = {}
        self.owed: dict[int, list[Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        self.dropped = False

    def ports(self, micro: int) -> list[Port]:
        shape = (len(self.micros[micro][0]), self.net.width)
        end = len(self.net.layers) - 1
        found = [Port(s, s, s + 1, shape, torch.float64, True) for s in range(end)]
        if self.net.skip and end >= 2:
            found.append(Port(0, 0, 2, shape, torch.float64, True))
        if self.net.odd and end >= 1:
            found.append(Port(100, 0, end, shape[:1], torch.int64, False))
            found.append(Port(101, 0, end, (0, 3), torch.float64, True))
        return sorted(found, key=lambda p: (p.value, p.target))

    def takes(self, micro: int) -> list[Port]:
        return [p for p in self.ports(micro) if p.target == self.index]

    def gives(self, micro: int) -> list[Port]:
        return [p for p in self.ports(micro) if p.source == self.index]

    def forward(self, micro: int, taken: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        mine = {v: t.detach().requires_grad_(t.is_floating_point()) for v, t in taken.items()}
        x, target, weight = self.micros[micro]
        before = mine[self.index - 1] if self.index else x
        first = mine[0] if self.net.skip and self.index == 2 else None
        y = self.net.run(self.index, before, first, mine.get(100) if self.last else None)
        made = {self.index: y}
        if self.index == 0 and self.net.odd:
            made |= {100: whole_numbers(y), 101: torch.zeros(0, 3, dtype=torch.float64)}
        if self.last:
            loss = nn.functional.mse_loss(y, target) * weight
            self.losses[micro] = loss.detach()
            made = {-1: loss}
        self.kept[micro] = mine, made
        return made

    def backward(self, micro: int, grads: Mapping[Port, Tensor]) -> Mapping[Port, Tensor]:
        mine, made = self.kept.pop(micro)
        pairs = (
            [(made[-1], None)]
            if self.last
            else [(made[p.value], g) for p, g in grads.items() if p.value < 100]
        )
        roots, given = [r for r, _ in pairs], [g for _, g in pairs]
        floats = {v: t for v, t in mine.items() if t.is_floating_point()}
        weights = list(self.net.layers[self.index].parameters())
        found = torch.autograd.grad(roots, [*floats.values(), *weights], given, allow_unused=True)
        self.owed[micro] = list(found[len(floats) :])
        if not self.apart:
            self.weights(micro)
        by_value = dict(zip(floats, found, strict=False))
        return {p: by_value[p.value] for p in self.takes(micro) if by_value.get(p.value) is not None}

    def weights(self, micro: int) -> None:
        for p, g in zip(self.net.layers[self.index].parameters(), self.owed.pop(micro), strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g

    def drop(self) -> None:
        self.kept, self.owed, self.dropped = {}, {}, True


def batch(micros: int, rows: int = 2, width: int = WIDTH) -> list[tuple[Tensor, Tensor, float]]:
    """The last micro-batch is shorter."""
    made = torch.Generator().manual_seed(7)
    sizes = [rows] * (micros - 1) + [max(1, rows - 1)]
    rand = lambda n: torch.randn(n, width, generator=made, dtype=torch.float64)  # noqa: E731
    return [(rand(n), rand(n), n / sum(sizes)) for n in sizes]


def alone(net: Net, micros) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process with the same cut."""
    net = copy.deepcopy(net)
    total = torch.zeros((), dtype=torch.float64)
    for x, target, weight in micros:
        loss = nn.functional.mse_loss(net(x), target) * weight
        loss.backward()
        total += loss.detach()
    return total, [p.grad for p in net.parameters()]


def workers(net: Net, orders, micros) -> list[dict[int, Part]]:
    """The stages of every worker, each on a copy of the model."""
    apart = any(a.kind == "weights" for order in orders for a in order)
    found = []
    for order in orders:
        mine = copy.deepcopy(net)
        found.append({s: Part(mine, s, micros, apart) for s in sorted({a.stage for a in order})})
    return found


def together(groups, orders, parts, steps: int = 1, act=None) -> list[Ran | Lost | BaseException]:
    """Every worker's outcome of its last step."""
    outcomes: list[Ran | Lost | BaseException] = [AssertionError("never ended")] * len(orders)

    def body(rank: int) -> None:
        try:
            runtime = Runtime(groups[rank])
            for step in range(steps):
                outcomes[rank] = runtime.run(
                    orders, parts[rank], step, Deadline.after(SOON_S), act and (lambda a: act(rank, a))
                )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(r,)) for r in range(len(orders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive(), "somebody waits for ever"
    return outcomes


def summed(net: Net, parts) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients over all workers: those of replicas add up."""
    loss = sum(x for mine in parts for part in mine.values() for x in part.losses.values())
    grads = []
    for s, layer in enumerate(net.layers):
        for at, _ in enumerate(layer.parameters()):
            found = [list(m[s].net.layers[s].parameters())[at].grad for m in parts if s in m]
            grads.append(sum(g for g in found if g is not None))
    return loss, grads
