"""Random operations of a Group against plain torch: every rank draws the same ones, and knows what all ranks bring."""

from __future__ import annotations

import random

import torch

from echelon.comm.group import Group
from tests.contract.group_contract import REAL, brings, equal, expected, met, ops_of

SIZES = (0, 1, 2, 3, 17, 100, 1000, 4097, 65_537, 300_001)
KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "message",
)


class Storm:
    """`run(num)` begins operations up to six at a time and checks each when it has met."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group, self.draw = group, random.Random(seed)

    def run(self, num: int) -> None:
        under_way: list[tuple[object, object]] = []
        for number in range(num):
            under_way.append(self.one(number))
            while len(under_way) > self.draw.randrange(6):
                works, check = under_way.pop(0)
                for work in works:  # type: ignore[attr-defined]
                    met(work)
                check()  # type: ignore[operator]
        for works, check in under_way:
            for work in works:  # type: ignore[attr-defined]
                met(work)
            check()  # type: ignore[operator]

    def one(self, salt: int):
        """The works of one random operation on this rank, and what checks its result."""
        g, draw = self.group, self.draw
        kind, dtype, n = draw.choice(KINDS), draw.choice(REAL), draw.choice(SIZES)
        root, op = draw.randrange(g.size), draw.choice(ops_of(dtype))
        counts = [[draw.choice((0, 1, 50, 3000)) for _ in range(g.size)] for _ in range(g.size)]
        mine = brings(g.rank, n, dtype, salt)
        everybody = torch.stack([brings(r, n, dtype, salt) for r in range(g.size)])
        if kind == "all_reduce":
            return [g.all_reduce(mine, op)], lambda: equal(mine, expected(g.size, n, dtype, op, salt), op)
        if kind == "reduce":
            want = expected(g.size, n, dtype, op, salt) if g.rank == root else mine.clone()
            return [g.reduce(mine, root, op)], lambda: equal(mine, want, op)
        if kind == "reduce_scatter":
            n = min(n, 65_537)
            rows = torch.stack([brings(g.rank, n, dtype, salt + r) for r in range(g.size)])
            out = torch.empty(n, dtype=dtype)
            return [g.reduce_scatter(out, rows, op)], lambda: equal(
                out, expected(g.size, n, dtype, op, salt + g.rank), op
            )
        if kind == "broadcast":
            return [g.broadcast(mine, root)], lambda: equal(mine, everybody[root])
        if kind == "all_gather":
            out = torch.empty_like(everybody)
            return [g.all_gather(out, mine)], lambda: equal(out, everybody)
        if kind == "gather":
            room = torch.empty_like(everybody) if g.rank == root else None
            return [g.gather(room, mine, root)], lambda: None if room is None else equal(room, everybody)
        if kind == "scatter":
            out = torch.empty(n, dtype=dtype)
            rows = torch.stack([brings(root, n, dtype, salt + r) for r in range(g.size)])
            return [g.scatter(out, rows if g.rank == root else None, root)], lambda: equal(out, rows[g.rank])
        if kind == "all_to_all":
            sends, takes = counts[g.rank], [row[g.rank] for row in counts]
            x = torch.cat([brings(g.rank, c, dtype, salt + b) for b, c in enumerate(sends)])
            out = torch.empty(sum(takes), dtype=dtype)
            want = torch.cat([brings(a, c, dtype, salt + g.rank) for a, c in enumerate(takes)])
            return [g.all_to_all(out, x, takes, sends)], lambda: equal(out, want)
        if kind == "barrier":
            return [g.barrier()], lambda: None
        step = draw.randrange(1, g.size)
        to, source = (g.rank + step) % g.size, (g.rank - step) % g.size
        room = torch.empty_like(mine)
        return [g.send(mine, to, salt), g.recv(room, source, salt)], lambda: equal(room, everybody[source])
