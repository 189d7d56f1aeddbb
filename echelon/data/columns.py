"""Columns of a table: what one worker has of a data set whose features lie on several (docs/vertical.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from echelon.data.sides import Told
from echelon.errors import UsageError


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """The columns of a table that this process has, and the labels if they are its own.

    `values` (rows × columns) has the columns `names`; `of` names all columns of the table in the order in which the model's first layer
    reads them, and is the same on every worker. `target` holds a label for each row on the worker that owns them, and is None on the
    others, where the label of a sample is an empty tensor. With `ids` (whole numbers or strings, each once) rows are put in the order of
    their ids, so that files may be in any order. Nothing leaves the process here.
    """

    def __init__(
        self,
        values: Any,
        names: Sequence[str],
        of: Sequence[str],
        target: Any = None,
        ids: Sequence[int] | Sequence[str] | Tensor | None = None,
    ) -> None:
        self.values, self.of = torch.as_tensor(values), tuple(of)
        _check(self.values, tuple(names), self.of)
        ordered = sorted(range(len(names)), key=lambda i: self.of.index(names[i]))
        self.names = tuple(names[i] for i in ordered)
        self.values = self.values[:, ordered]
        self.target = None if target is None else torch.as_tensor(target)
        if self.target is not None and len(self.target) != len(self.values):
            raise UsageError(f"Columns has {len(self.values)} rows of values and {len(self.target)} labels")
        self.ids = ""
        if ids is not None:
            self._sort(ids.tolist() if isinstance(ids, Tensor) else list(ids))
        self.nothing = torch.empty(0)

    def _sort(self, ids: list[Any]) -> None:
        if len(ids) != len(self.values) or len(set(ids)) != len(ids):
            raise UsageError(
                f"Columns has {len(self.values)} rows and {len(set(ids))} different ids ({len(ids)} in all)",
                remedy="Every row has an id of its own.",
            )
        order = sorted(range(len(ids)), key=ids.__getitem__)
        self.values = self.values[order]
        self.target = None if self.target is None else self.target[order]
        self.ids = _digest([ids[i] for i in order])

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.values[row], self.nothing if self.target is None else self.target[row]

    def told(self) -> Told:
        """What other workers hear of it."""
        return Told(len(self), self.names, _digest(list(self.of)), self.target is not None, self.ids)


def _check(values: Tensor, names: tuple[str, ...], of: tuple[str, ...]) -> None:
    if values.dim() != 2 or values.shape[1] != len(names):
        raise UsageError(
            f"Columns has {len(names)} names for values of shape {tuple(values.shape)}",
            remedy="values is rows × columns, with a name for each column.",
        )
    unknown = [name for name in names if name not in of]
    if unknown or len(set(names)) != len(names) or len(set(of)) != len(of):
        why = f"`of` does not name {unknown[0]!r}" if unknown else "a name comes twice"
        raise UsageError(f"the columns of a table have different names, all of them in `of`: {why}")


def _digest(words: list[Any]) -> str:
    return hashlib.sha256("\0".join(map(repr, words)).encode()).hexdigest()


def columns_of(obj: Any) -> Columns | None:
    """The Columns behind a loader, a dataset or a subset of one; None where there are none."""
    while isinstance(obj, DataLoader) or (isinstance(obj, Dataset) and hasattr(obj, "dataset")):
        obj = obj.dataset
    return obj if isinstance(obj, Columns) else None
