"""Level 1: every parameter's optimizer state lies with one rank, which steps it and sends the others its new value.

1. set aside: gradients of parameters that others own, so that the optimizer makes no state for them
2. step: the optimizer's own
3. share: every owner's new values go to everybody, in messages of some MiB an owner and type
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon import activity
from echelon.clock import Deadline
from echelon.comm.group import Group, Lost, Work, merge
from echelon.errors import PeerLost
from echelon.mesh.moves import factor
from echelon.parallel.buckets import pack
from echelon.parallel.wire import Traffic

SHARE_LIMIT_S = 1800.0
ROUND_BYTES = 32 << 20
"""New values of all owners that are under way at a time: they are copied for it, and lie beside the parameters."""


class Owned:
    """Whose state is where: parameters' ids -> ranks of `group`. One without an owner is stepped by everybody."""

    def __init__(self, group: Group, owner: dict[int, int], traffic: Traffic | None = None) -> None:
        self.group, self.owner = group, owner
        self.traffic = traffic or Traffic()

    def mine(self, param: Tensor) -> bool:
        return self.owner.get(id(param), self.group.rank) == self.group.rank

    def drop_state(self, optimizer: torch.optim.Optimizer) -> None:
        """State of what others own has no use here."""
        for param in [p for p in optimizer.state if isinstance(p, Tensor) and not self.mine(p)]:
            del optimizer.state[param]

    def step(
        self, params: Sequence[Tensor], inner: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """The optimizer's own step over `params`. Raises PeerLost when a peer was lost: some may have stepped, some not."""
        aside: list[tuple[Tensor, Tensor]] = []
        moved: list[Tensor] = []

        def set_aside() -> None:
            moved[:] = [p for p in params if p.grad is not None]
            for param in moved:
                if not self.mine(param) and param.grad is not None:
                    aside.append((param, param.grad))
                    param.grad = None

        def evaluate() -> Any:
            assert closure is not None
            bring_back()
            result = closure()
            set_aside()
            return result

        def bring_back() -> None:
            for param, grad in aside:
                param.grad = grad
            aside.clear()

        try:
            if closure is None:
                set_aside()
                result = inner()
            else:
                result = inner(evaluate)
        finally:
            bring_back()
        self._share(moved)
        return result

    @torch.no_grad()
    @activity.named("the owners' new values")
    def _share(self, moved: Iterable[Tensor]) -> None:
        parts: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for param in moved:
            if id(param) in self.owner:
                parts.setdefault((self.owner[id(param)], param.dtype), []).append(param.detach())
        rounds: dict[int, list[tuple[int, list[Tensor]]]] = {}
        for (owner, _), values in sorted(parts.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            each = ROUND_BYTES // len(parts)
            for number, chosen in enumerate(pack([v.nbytes for v in values], each, each)):
                rounds.setdefault(number, []).append((owner, [values[i] for i in chosen]))
        deadline = Deadline.after(SHARE_LIMIT_S)
        for number in sorted(rounds):
            self._round(rounds[number], deadline)

    def _round(self, messages: Iterable[tuple[int, list[Tensor]]], deadline: Deadline) -> None:
        sent: list[tuple[Work, Tensor, list[Tensor], bool]] = []
        for owner, values in messages:
            here = owner == self.group.rank
            flat = torch.cat([v.reshape(-1) for v in values]) if here else self._room(values)
            num_bytes = int(flat.nbytes * factor("broadcast", self.group.size))
            self.traffic.sent_bytes += num_bytes
            self.traffic.plain_bytes += num_bytes
            sent.append((self.group.broadcast(flat, owner), flat, values, here))
        outcome = merge([work.wait(deadline) for work, *_ in sent])
        if isinstance(outcome, Lost):
            raise PeerLost(
                f"a peer was lost while the new values of a step were sent: {outcome.reason}",
                peers=outcome.peers,
            )
        for _, flat, values, here in sent:
            for value, piece in zip(values, flat.split([v.numel() for v in values]), strict=True):
                if not here:
                    value.copy_(piece.view(value.shape))

    def _room(self, values: list[Tensor]) -> Tensor:
        return values[0].new_empty(sum(v.numel() for v in values))
