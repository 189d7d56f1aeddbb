"""Are gradients finite, and whose parts were not? One pass over them; the rare second look names what is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from echelon.comm.group import Work
from echelon.parallel.buckets import Bucket
from echelon.parallel.wire import Wire

KEPT = 4096
"""Messages that a watch remembers; a step has a few."""


@torch.no_grad()
def finite(tensors: Sequence[Tensor]) -> bool:
    """Neither NaN nor infinity in any of them. Reading the answer waits for a GPU."""
    values = [_dense(x) for x in tensors if x.numel()]
    if not values:
        return True
    norms = torch._foreach_norm(values)
    if all(bool(torch.isfinite(torch.stack(of)).all()) for of in _alike(norms)):
        return True
    return all(_exactly(x) for x in values)  # a norm may overflow where the numbers do not


@torch.no_grad()
def broken(tensors: Iterable[Tensor]) -> list[int]:
    """The positions of those that are not finite."""
    return [i for i, x in enumerate(tensors) if x.numel() and not _exactly(_dense(x))]


def _dense(x: Tensor) -> Tensor:
    x = x.detach()
    return x.coalesce().values() if x.is_sparse else x


def _exactly(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _alike(norms: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one type and device together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for norm in norms:
        found.setdefault((norm.dtype, norm.device), []).append(norm)
    return list(found.values())


class Watch:
    """Looks at what this rank sends before it becomes the sum, so that it can be said later whose part was not finite. `wire.send` is
    replaced on the instance."""

    def __init__(self, wire: Wire) -> None:
        self._norms: deque[Tensor] = deque(maxlen=KEPT)
        send = wire.send

        def watched(bucket: Bucket) -> Work:
            views = [slot.view for slot in bucket.slots if slot.view is not None]
            if views:
                with torch.no_grad():
                    self._norms.append(torch.stack(torch._foreach_norm(views)))
            return send(bucket)

        wire.send = watched  # type: ignore[method-assign]

    def clear(self) -> None:
        """What was sent so far counts no more."""
        self._norms.clear()

    def broken(self) -> bool:
        """Was something that this rank sent since clear() not finite?"""
        return not all(bool(torch.isfinite(norm).all()) for norm in self._norms)
