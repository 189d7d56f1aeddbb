"""Who has which columns of a table, and who its labels: what workers tell each other, and what follows. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from echelon.errors import UsageError


@dataclass(frozen=True)
class Told:
    """What a worker tells of its columns: their names and how many rows there are, never a value."""

    rows: int
    names: tuple[str, ...]
    of: str
    """A digest of the names of all columns, in order."""
    labels: bool
    ids: str = ""
    """A digest of the sorted ids of its rows; "" where rows have none."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Told:
        fields = json.loads(text)
        return cls(**(fields | {"names": tuple(fields["names"])}))


@dataclass(frozen=True)
class Sides:
    """How one table lies on the workers."""

    columns: tuple[tuple[int, ...], ...]
    """By worker: the places of its columns among all."""
    owner: int
    """The worker that has the labels."""

    def line(self) -> str:
        """For people."""
        widths = " + ".join(str(len(places)) for places in self.columns)
        return f"columns: {widths}, a worker each; labels and the other layers: worker {self.owner}"


def whole(told: Told, of: Sequence[str]) -> bool:
    """Is all of the table there?"""
    return told.labels and len(told.names) == len(of)


def sides(told: Sequence[Told], of: Sequence[str]) -> Sides | None:
    """What the workers have together; None where each of them has everything. UsageError where it makes no table."""
    if all(whole(one, of) for one in told):
        return None
    _same_rows(told)
    holders: dict[str, int] = {}
    for worker, one in enumerate(told):
        for name in one.names:
            if name in holders:
                raise UsageError(
                    f"column {name!r} is on worker {holders[name]} and on worker {worker}",
                    remedy="Each column belongs to one worker: drop it on the other, or give it another name there.",
                )
            holders[name] = worker
    missing = [name for name in of if name not in holders]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(
            f"no worker has column {', '.join(map(repr, missing[:3]))}{more}",
            remedy="Start one worker for each file (echelon run --workers 3 --strategy tensor=3), or leave the column out of `of`.",
        )
    owners = [worker for worker, one in enumerate(told) if one.labels]
    if len(owners) != 1:
        who = f"workers {', '.join(map(str, owners))} have" if owners else "no worker has"
        raise UsageError(
            f"{who} the labels, and one must",
            remedy="Give Columns(…, target=labels) on the worker that owns them, and target=None on the others.",
        )
    for worker, one in enumerate(told):
        if not one.names and worker != owners[0]:
            raise UsageError(
                f"worker {worker} has no columns and no labels",
                remedy="Start one worker for each file.",
            )
    return Sides(tuple(tuple(map(list(of).index, one.names)) for one in told), owners[0])


def _same_rows(told: Sequence[Told]) -> None:
    """Row i is the same sample everywhere, as far as that can be seen."""
    for worker, one in enumerate(told):
        if one.of != told[0].of:
            raise UsageError(
                f"workers 0 and {worker} name different columns, or the same ones in another order, for the whole table",
                remedy="Give the same list as Columns(…, of=…) on all of them: the model's first layer reads them in this order.",
            )
        if one.rows != told[0].rows:
            raise UsageError(
                f"worker 0 has {told[0].rows} rows and worker {worker} has {one.rows}",
                remedy="Row i must be the same sample in every file: keep the rows that all of them have.",
            )
        if bool(one.ids) != bool(told[0].ids):
            raise UsageError(
                f"workers 0 and {worker}: one of them gives ids for its rows, the other none",
                remedy="Give Columns(…, ids=…) on all workers, or on none where the files have the same order.",
            )
        if one.ids != told[0].ids:
            raise UsageError(
                f"workers 0 and {worker} have {one.rows} rows each, but not with the same ids",
                remedy="Keep the rows whose ids are in every file.",
            )
