"""The global order of an epoch: what the script's own sampler yields under a generator of (seed, epoch).

Every rank runs the sampler, so nobody deals on the path of a step and no `set_epoch` is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from echelon.data.randomness import Stream, mix
from echelon.errors import UsageError

CHUNK_BATCHES = 64
"""Batches drawn at a time where nobody can tell: swapping the random states costs about 130 µs."""

_KNOWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def batches(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[list[Any]]:
    """The batches of sample ids that plain torch would fetch in this epoch of this loader.

    An explicit generator gives exactly torch's order: torch draws one number from it for the loader's processes
    before the sampler runs, and so do we. Without one, the sampler runs under (seed, epoch).
    """
    stream = Stream(mix(seed, epoch, "order"))
    with stream.entered():
        kept = loader.persistent_workers and epoch > 0  # processes that live on are not seeded again
        if loader.generator is not None and not kept:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        source = iter(loader.batch_sampler)  # type: ignore[arg-type]
    if _has_generator(loader):
        yield from map(list, source)  # draws from its own generator only, and only when asked
        return
    ahead = CHUNK_BATCHES if _is_torchs(loader) else 1  # a script's sampler may look at the training
    while True:
        with stream.entered():
            chunk = [list(batch) for batch in islice(source, ahead)]
        yield from chunk
        if len(chunk) < ahead:
            return


def generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that the script gave: their states are part of where the data is."""
    sampler = loader.batch_sampler
    found = [
        loader.generator,
        getattr(sampler, "generator", None),
        getattr(getattr(sampler, "sampler", None), "generator", None),
    ]
    unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())


def draws_at_once(loader: DataLoader[Any]) -> bool:
    """Whether an epoch's order is drawn when it begins, so that later draws from the same generator are not its own."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not _is_torchs(loader):
        return False
    return not isinstance(sampler, RandomSampler) or (
        not sampler.replacement and sampler.num_samples <= len(sampler.data_source)  # type: ignore[arg-type]
    )


def pass_over(loader: DataLoader[Any], seed: int, epochs: range) -> None:
    """Runs a script's own sampler through epochs that were done in an earlier life: it may count them itself.

    Torch's samplers know no more than their generators, which are put back without that.
    """
    if loader.batch_sampler is not None and not _is_torchs(loader):
        for epoch in epochs:
            for _ in batches(loader, seed, epoch):
                pass


def _is_torchs(loader: DataLoader[Any]) -> bool:
    sampler = loader.batch_sampler
    return type(sampler) is BatchSampler and type(sampler.sampler) in _KNOWN


def batch_sizes(loader: DataLoader[Any]) -> tuple[int, int, int] | None:
    """(batches of an epoch, samples of each, samples of the last), where that is known: a script's own sampler may say anything."""
    sampler = loader.batch_sampler
    if not _is_torchs(loader) or sampler is None or not len(loader):
        return None
    samples, size = len(sampler.sampler), int(sampler.batch_size)  # type: ignore[attr-defined]
    return len(loader), size, min(size, samples - size * (len(loader) - 1))


def _has_generator(loader: DataLoader[Any]) -> bool:
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return _is_torchs(loader) and getattr(sampler, "generator", None) is not None


def refuse_cut_sampler(loader: DataLoader[Any]) -> None:
    """A DistributedSampler has cut the data already: cutting its batches again would drop most samples."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            f"this loader's DistributedSampler gives each rank 1/{sampler.num_replicas} of the data, and prepare() cuts "
            "every batch over the workers itself",
            remedy="Build the loader with shuffle=True (or your own sampler) and without DistributedSampler and set_epoch.",
        )
