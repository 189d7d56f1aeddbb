"""Named dense tables on a server, each with its optimizer: what the direct API talks to. One push is one update.

A table lies in pieces of one to four megabytes. Whoever pushes or pulls goes through them in order and takes the next piece's lock before it lets
go of the last one's, so nobody overtakes anybody: two clients work on one table at a time, yet every pull sees whole updates
only, and all updates happen in one order. Each block of a piece is updated and copied out in one pass (csrc/spread.cpp).
"""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.errors import EchelonError, UsageError
from echelon.native.spread import copy
from echelon.native.update import Copies
from echelon.ps.frame import ALIGN, MIB
from echelon.ps.optimizers import Range
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request

PIECE_BYTES = MIB
LARGEST_PIECE_BYTES = 4 * MIB
"""A piece is this much at most, and a 32nd of its table: more is less to do between pieces, and more that the next client waits for."""

MAX_NAME_CHARS = 200
LARGE_BYTES = 64 * MIB
"""Before a table of this size is made, it is looked whether there is memory for it."""

LISTED = 1000
"""Tables that are told of at a time."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Kind:
    """What two clients must agree on to share a table. This server holds elements [begin, end) of the flat whole."""

    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int
    recipe: Recipe

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value:g}" for name, value in self.recipe.numbers.items())
        part = (
            ""
            if (self.begin, self.end) == (0, math.prod(self.shape))
            else f", elements {self.begin} to {self.end}"
        )
        return f"{self.dtype} {list(self.shape)} with {self.recipe.name}({numbers}){part}"


class Table:
    """One table (or this server's part of it). Thread-safe."""

    def __init__(self, name: str, kind: Kind, init: Tensor) -> None:
        self.name, self.kind = name, kind
        self.version = 0
        """Updates so far."""
        self.values = init.clone()
        step = max(PIECE_BYTES, min(LARGEST_PIECE_BYTES, init.nbytes // 32 // ALIGN * ALIGN)) // init.itemsize
        self._spans = [(at, min(at + step, init.numel())) for at in range(0, max(1, init.numel()), step)]
        self._pieces = [Range(kind.recipe, self.values[a:b]) for a, b in self._spans]
        self._locks = [threading.Lock() for _ in self._spans]
        self._torn = ""

    @property
    def small(self) -> bool:
        """All of it is one piece."""
        return len(self._pieces) == 1

    def work(self, grad: Tensor | None, numbers: Mapping[str, Any] | None, out: Tensor | None) -> int:
        """One update if there is a gradient, then the values into `out` if there is one. Gives the version that `out` has."""
        recipe = self._recipe(numbers)
        self._locks[0].acquire()
        last = 0
        try:
            version = self._next(grad)
            for at, (begin, end) in enumerate(self._spans):
                if at:
                    self._locks[at].acquire()
                    self._locks[at - 1].release()
                    last = at
                piece = self._pieces[at]
                if grad is not None:
                    copies = [] if out is None else [(out, begin * out.itemsize)]
                    self._apply(piece, grad[begin:end], recipe, copies)
                elif out is not None:
                    copy(out[begin:end], piece.param)
            return version
        finally:
            self._locks[last].release()

    def work_small(
        self,
        grad: Tensor | None,
        numbers: Mapping[str, Any] | None,
        answer: Callable[[dict[str, Any], list[Tensor]], None],
    ) -> None:
        """The same for a table of one piece, answered while nobody else may touch it: it need not be copied for that."""
        recipe = self._recipe(numbers)
        with self._locks[0]:
            version = self._next(grad)
            if grad is not None:
                self._apply(self._pieces[0], grad, recipe)
            answer({"version": version}, [self.values])

    def _recipe(self, numbers: Mapping[str, Any] | None) -> Recipe:
        return self.kind.recipe.with_numbers(numbers) if numbers else self.kind.recipe

    def _next(self, grad: Tensor | None) -> int:
        """The version that this work leaves or sees. Holds the first lock."""
        if self._torn:
            raise EchelonError(
                f"table {self.name!r} is torn: {self._torn}", remedy="Create it anew under another name."
            )
        self.version += grad is not None
        return self.version

    def _apply(self, piece: Range, grad: Tensor, recipe: Recipe, copies: Copies = ()) -> None:
        try:
            piece.apply(grad, numbers=recipe, copies=copies)
        except (
            BaseException
        ) as error:  # such as no memory for the optimizer's state: some pieces have the update, some do not
            self._torn = f"an update ended with {type(error).__name__}"
            raise


class Tables:
    """The service "tables": create, describe, push, pull, push_pull, list."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}
        self._lock = threading.Lock()
        self.num_updates = 0
        """Close to right: for display."""

    @property
    def num_tables(self) -> int:
        """Of one that lies on several servers, only the first counts it."""
        return sum(not table.kind.begin for table in list(self._tables.values()))

    @property
    def num_bytes(self) -> int:
        return sum(table.values.nbytes for table in list(self._tables.values()))

    def called(self, request: Request) -> None:
        if request.verb in ("push_pull", "push", "pull"):
            self._work(request)
        elif request.verb == "create":
            self._create(request)
        elif request.verb == "describe":
            request.answer(self._told(self._find(request.head)))
        elif request.verb == "list":
            request.answer({"tables": self._listed(request.head.get("after", ""))})
        else:
            raise UsageError(
                f"tables have no {request.verb[:80]!r}", remedy="Is the client of the same version?"
            )

    def gone(self, peer: Peer) -> None:
        """Tables stay: they are not their creator's."""

    def _work(self, request: Request) -> None:
        table, verb = self._find(request.head), request.verb
        grad = None
        if verb != "pull":
            grad = _gradient(table, request)
        numbers = request.head.get("numbers")
        if numbers is not None and not isinstance(numbers, dict):
            raise UsageError(
                f"{verb}: numbers are a table of names and numbers, not {type(numbers).__name__}"
            )
        if verb == "push":
            request.answer({"version": table.work(grad, numbers, None)})
        else:
            if request.room_bytes != [table.values.nbytes]:
                raise UsageError(
                    f"{verb} of {table.name!r}: there is room for {request.out_bytes} bytes, and {table.kind} has {table.values.nbytes}",
                    remedy="Give an `out` of the table's shape and type.",
                )
            if table.small:
                table.work_small(grad, numbers, request.answer)
            else:
                out = request.room()[0].view(table.values.dtype)
                request.answer({"version": table.work(grad, numbers, out)}, [out])
        if grad is not None:
            self.num_updates += 1

    def _create(self, request: Request) -> None:
        name, kind = _read_kind(request.head)
        if len(request.tensors) != 1:
            raise UsageError(
                f"create {name!r}: one tensor of first values is needed, {len(request.tensors)} came"
            )
        init = request.tensors[0]
        if init.dtype is not DTYPES[kind.dtype] or init.numel() != kind.end - kind.begin:
            raise UsageError(f"create {name!r}: {init.dtype} of {init.numel()} elements came for {kind}")
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                _check_memory(name, kind, init.nbytes)
                table = self._tables[name] = Table(name, kind, init.reshape(-1))
            elif table.kind != kind:
                raise UsageError(
                    f"table {name!r} is there as {table.kind}, and was to be created as {kind}",
                    remedy="Create it alike on every client (and give all the same servers), or choose another name.",
                )
        request.answer(self._told(table))

    def _find(self, head: dict[str, Any]) -> Table:
        name = head.get("name")
        table = self._tables.get(name) if isinstance(name, str) else None
        if table is None:
            near = difflib.get_close_matches(str(name)[:MAX_NAME_CHARS], list(self._tables)[:10_000], n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"there is no table {str(name)[:MAX_NAME_CHARS]!r}",
                remedy=f"{hint}create() makes one; tables() lists them.",
            )
        return table

    def _listed(self, after: object) -> dict[str, Any]:
        """The next names behind `after`, in order; none when that was the last."""
        names = sorted(name for name in list(self._tables) if name > str(after))
        return {name: self._told(self._tables[name]) for name in names[:LISTED]}

    def _told(self, table: Table) -> dict[str, Any]:
        kind = table.kind
        return {
            "shape": list(kind.shape), "dtype": kind.dtype, "begin": kind.begin, "end": kind.end,
            "optimizer": kind.recipe.to_plain(), "version": table.version,
        }  # fmt: skip


def _gradient(table: Table, request: Request) -> Tensor:
    if len(request.tensors) != 1:
        raise UsageError(
            f"{request.verb} to {table.name!r}: one gradient is needed, {len(request.tensors)} came"
        )
    grad = request.tensors[0]
    if grad.dtype is not table.values.dtype or grad.numel() != table.values.numel():
        kind = str(grad.dtype).removeprefix("torch.")
        raise UsageError(
            f"{request.verb} to {table.name!r}: a {kind} gradient of {list(grad.shape)} came for {table.kind}",
            remedy="A gradient has the shape and the type of its table.",
        )
    return grad if grad.dim() == 1 else grad.view(-1)


def _read_kind(head: dict[str, Any]) -> tuple[str, Kind]:
    name, shape, dtype = head.get("name"), head.get("shape"), head.get("dtype")
    begin, end = head.get("begin"), head.get("end")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise UsageError(f"a table's name is a text of 1 to {MAX_NAME_CHARS} letters")
    if (
        not isinstance(shape, list)
        or any(type(dim) is not int or dim < 0 for dim in shape)
        or len(shape) > 32
    ):
        raise UsageError(f"create {name!r}: that is no shape")
    if dtype not in DTYPES:
        raise UsageError(
            f"create {name!r}: tables are float32 or float64, not {str(dtype)[:40]}",
            remedy="Keep weights in float32; gradients may be computed in less.",
        )
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= math.prod(shape):
        raise UsageError(f"create {name!r}: that is no part of {shape}")
    return name, Kind(tuple(shape), str(dtype), begin, end, Recipe.from_plain(head.get("optimizer")))


def _check_memory(name: str, kind: Kind, num_bytes: int) -> None:
    if num_bytes < LARGE_BYTES:
        return
    import psutil

    free = int(psutil.virtual_memory().available)
    if num_bytes > 0.9 * free:
        raise UsageError(
            f"create {name!r}: {kind} takes {num_bytes >> 20} MiB here, and this server's machine has {free >> 20} MiB left",
            remedy="Use more servers, on other machines.",
        )
