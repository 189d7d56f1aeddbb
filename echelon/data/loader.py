"""The rewindable loader of a map-style dataset: global batches in order, this rank's part of each.

It stands on one inner DataLoader whose batch sampler is an iterator that can be rewound (Dealer). After a lost step,
parts that were dealt already come out in order and are dropped, and the batches since the last commit enter
behind them; an end mark that stays in flight keeps the loader's processes alive until the last step is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from echelon.control.terminated import spare_this_process
from echelon.data import order
from echelon.data.deal import BEGINNING, Cut, Done, Micro, Picker, Position, Takes, micros, num_pieces, pieces
from echelon.data.randomness import capture, mix, restore, seed_cpu
from echelon.env import place

END = "<end of epoch>"
NOTHING = Micro(-1, -1, 0, (), 1, True)
"""Stands for a batch that was asked for when there was no piece to take."""

Take = Callable[[int, int | None, Done], Takes]
"""(epoch, how many pieces there are if that is known, which of them are done) -> where this worker's come from."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a micro-step. count is 0 for a stand-in, whose data must count for nothing."""

    micro: Micro
    count: int
    data: Any


class Dealer:
    """The batch sampler of the inner loader: an iterator that can be rewound, also after it ran dry."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.plan: Iterator[Micro] = iter(())
        self.queue: deque[Micro] = deque()
        self.sent: deque[Micro | None] = deque()
        self.ended = False
        self.picker: Picker[list[Micro]] | None = None

    def start(
        self,
        plan: Iterator[Micro],
        again: Sequence[Micro] = (),
        picker: Picker[list[Micro]] | None = None,
    ) -> None:
        """A new epoch; `again` (left over from the last one) comes first. With a picker, pieces are taken one by one."""
        self.plan, self.queue, self.ended, self.picker = plan, deque(again), False, picker
        self.sent.clear()

    def _next(self) -> Micro | None:
        if not self.queue and self.picker is not None:
            found = self.picker.pick(wait=all(m is NOTHING for m in self.sent))
            if found is None and not self.picker.takes.over:
                return NOTHING
            self.queue.extend(found or ())
        return self.queue.popleft() if self.queue else next(self.plan, None)

    def rewind(self, again: Sequence[Micro]) -> int:
        """Deals `again` and all that is in flight once more; returns how many parts in flight to drop."""
        flying = list(self.sent)
        self.queue.extendleft(reversed([*again, *(m for m in flying if m is not None and m is not NOTHING)]))
        self.ended = False
        return len(flying)

    def __iter__(self) -> Dealer:
        return self

    def __next__(self) -> list[tuple[int, Any]]:
        micro = self._next()
        if micro is NOTHING:
            self.sent.append(micro)
            return [(-1, END)]
        if micro is None:
            if self.ended:
                raise StopIteration
            self.ended = True
            self.sent.append(None)
            return [(-1, END)]
        self.sent.append(micro)
        lo, hi = micro.dealt(self.cut.rank, self.cut.size)
        return [(micro.epoch, i) for i in (micro.ids[lo:hi] if hi > lo else micro.ids[:1])]


@dataclass(frozen=True)
class Ready:
    """A batch that needs no collating any more."""

    batch: Any


class Seeded(Dataset[Any]):
    """The script's dataset, with every sample's randomness seeded by (seed, epoch, sample)."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[..., Any]) -> None:
        self.dataset, self.seed = dataset, seed
        self.rows = _rows(dataset) if collate is default_collate else None
        """Tensors whose rows are the samples: then a batch is one look-up a tensor, with default_collate's result."""
        self.plain = _draws_nothing(dataset)
        self.batched = _fetches_batches(dataset)

    def __getitems__(self, keys: list[tuple[int, Any]]) -> Any:
        if keys[0][1] is END or keys[0][1] == END:
            return [END]
        if self.rows is not None:
            ids = torch.tensor([_inner(self.dataset, i) for _, i in keys])
            return Ready([t[ids] for t in self.rows])
        if self.plain:
            return self._fetch(keys)
        outside = capture() if get_worker_info() is None else None
        try:
            return self._fetch(keys)
        finally:
            if outside is not None:
                restore(outside)

    def _fetch(self, keys: list[tuple[int, Any]]) -> Any:
        if self.batched:
            self._seed(keys[0])
            return self.dataset.__getitems__([i for _, i in keys])
        samples = []
        for key in keys:
            self._seed(key)
            samples.append(self.dataset[key[1]])
        return samples

    def _seed(self, key: tuple[int, Any]) -> None:
        if not self.plain:
            seed_cpu(mix(self.seed, *key))


class Collate:
    """The script's collate_fn, that lets the end mark through."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Ready):
            return samples.batch
        if (
            isinstance(samples, list)
            and len(samples) == 1
            and isinstance(samples[0], str)
            and samples[0] == END
        ):
            return END
        return self.collate(samples)


class WorkerInit:
    """In a loader process: get_worker_info().dataset is the script's own dataset, then the script's worker_init_fn.

    Under a launcher, SIGTERM is the run's business and not this process's.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init
        self.spared = place().supervised

    def __call__(self, worker: int) -> None:
        if self.spared:
            spare_this_process()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Seeded):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # torch refuses a plain assignment
        if self.init is not None:
            self.init(worker)


@dataclass(frozen=True)
class Place:
    """Where an epoch goes on after a checkpoint. `source` is what the source of the parts itself must be put back to."""

    position: Position = BEGINNING
    source: Any = None
    ghost: bool = False
    """Where workers take pieces: the script was in the body with one that is done. Some batch comes first, which counts for nothing."""


START = Place()


class MapParts:
    """The parts of a map-style loader. One epoch is open at a time."""

    copies = False
    rereads = False

    def __init__(self, loader: DataLoader[Any], cut: Cut, seed: int, take: Take | None = None) -> None:
        order.refuse_cut_sampler(loader)
        self.user, self.cut, self.seed, self.take = loader, cut, seed, take
        self.dealer = Dealer(cut)
        self.takes: Takes | None = None
        """Of the epoch that is open, where workers take pieces."""
        self.before: tuple[Done, ...] = ()
        """What was done of it by workers who cut it in other ways."""
        self.drop = 0
        self.drawn_from: list[torch.Tensor] = []
        """States of the script's own generators when the epoch began."""
        self.inner: DataLoader[Any] = DataLoader(
            Seeded(loader.dataset, seed, loader.collate_fn),
            batch_sampler=self.dealer,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=Collate(loader.collate_fn),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=WorkerInit(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(mix(seed, "loader processes")),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def epoch(self, epoch: int, again: Sequence[Part] = (), place: Place = START) -> Iterator[Part]:
        """This rank's parts of one epoch from `place` on, after those of `again`."""
        source = place.source if isinstance(place.source, dict) else {"generators": place.source or ()}
        generators = order.generators(self.user)
        for generator, state in zip(generators, source["generators"], strict=False):
            generator.set_state(state)
        self.drawn_from = [generator.get_state() for generator in generators]
        done = [Done(*record) for record in source.get("done", ())]
        if self.take is None:
            plan = micros(self._order(epoch, done), epoch, self.cut, place.position)
            self.dealer.start(plan, [part.micro for part in again])
        else:
            self._deal(epoch, done, place, [part.micro for part in again])
        self.drop = 0
        inner = iter(self.inner)
        while True:
            data = next(inner)
            micro = self.dealer.sent.popleft()
            if self.drop:
                self.drop -= 1
                continue
            if micro is None:
                self.takes = None
                return
            if micro is NOTHING:
                continue
            lo, hi = micro.dealt(self.cut.rank, self.cut.size)
            yield Part(micro, hi - lo, data)

    def rewind(self, again: Sequence[Part]) -> None:
        """Yields these parts' micro-steps again, before anything else."""
        self.drop = self.dealer.rewind([part.micro for part in again])

    def _order(self, epoch: int, done: Sequence[Done]) -> Iterator[list[Any]]:
        """The epoch's batches; what workers did who took pieces of it is left out."""
        self.before = tuple(done)
        batches = order.batches(self.user, self.seed, epoch)
        for one in done:
            batches = one.rest(batches)
        return batches

    def _deal(self, epoch: int, done: list[Done], place: Place, again: list[Micro]) -> None:
        """Pieces are taken as this worker asks for them. Whoever was here before may have cut the batches over workers, or into
        other pieces: then what it left is cut anew."""
        assert self.take is not None
        if place.position != BEGINNING:
            done.append(Done(low=place.position.start))
        mine = Done(self.cut.accumulate, self.cut.pieces)
        if done and (done[-1].accumulate, done[-1].pieces) == (mine.accumulate, mine.pieces):
            mine = done.pop()
        sizes = order.batch_sizes(self.user)
        total = num_pieces(*sizes, self.cut) if sizes is not None and not done else None
        self.takes = self.take(epoch, total, mine)
        picker = Picker(pieces(self._order(epoch, done), epoch, self.cut), self.takes)
        ghost = picker.first if place.ghost else None
        if ghost:
            again.insert(0, replace(ghost[-1], batch=-1))
        self.dealer.start(iter(()), again, picker)

    def source(self, position: Position) -> Any:
        """What a Place needs to come back to `position` of the epoch that is open."""
        done = list(self.before)
        if self.takes is not None:
            low, above = self.takes.state()
            done.append(Done(self.cut.accumulate, self.cut.pieces, low, tuple(above)))
        if not done:
            return list(self.drawn_from)
        return {"generators": list(self.drawn_from), "done": [list(astuple(one)) for one in done]}

    @staticmethod
    def kept(part: Part) -> Part:
        """What must be kept of a yielded part to yield it again: its ids, not its data."""
        return Part(part.micro, part.count, None)


def _rows(dataset: Any) -> Sequence[torch.Tensor] | None:
    """The tensors behind a plain TensorDataset (also inside Subsets), if its samples are rows of strided ones."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(t.layout is not torch.strided for t in dataset.tensors):
        return None
    return dataset.tensors


def _inner(dataset: Any, index: Any) -> Any:
    while type(dataset) is Subset:
        index, dataset = dataset.indices[index], dataset.dataset
    return index


def _draws_nothing(dataset: Any) -> bool:
    """True for datasets that are known to look samples up and draw no random number."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(d) for d in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple)


def _fetches_batches(dataset: Any) -> bool:
    """True when the dataset really fetches many samples at once; Subset only passes the call on."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
