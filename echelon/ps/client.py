"""The direct API: named tables on parameter servers, without a trainer.

with echelon.ps.connect("127.0.0.1:4711") as ps:
    ps.create("w", torch.zeros(1000), "adam", lr=1e-3)
    w = ps.push_pull("w", grad).wait()
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from echelon import env
from echelon.clock import Deadline
from echelon.control import token as tokens
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, UsageError
from echelon.ps.frame import ALIGN
from echelon.ps.link import Link
from echelon.ps.pending import Pending, Reply
from echelon.ps.recipes import Number, Recipe

SERVE = "serve"
"""The name under which servers without a run are reached."""

CONNECT_S = 30.0
WAIT_S = 300.0
SPLIT_BYTES = 256 * 1024
"""A table is cut over all servers when each gets at least this much."""

TIDY_AT = 256
"""So many flights are remembered before those that are done are forgotten."""

Array = Tensor | numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Elements [begin, end) of a flat table, on one server."""

    link: Link
    begin: int
    end: int


@dataclass(frozen=True)
class Known:
    """What a client knows of a table."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    as_numpy: bool


class Flight:
    """Calls that make one push or pull: what Client.wait() needs of it. It holds no values that only the Work gives."""

    def __init__(self, pendings: list[Pending], land: Landing | None) -> None:
        self.pendings = pendings
        self.rest = land if land is not None and land.out is not None and not land.direct else None
        """What is still to be brought from `flat` to the caller's `out`."""
        self.waited_for = False

    @property
    def done(self) -> bool:
        return all(pending.done for pending in self.pendings)

    @property
    def settled(self) -> bool:
        """Nothing of it is left for Client.wait()."""
        failed = any(pending.failed for pending in self.pendings)
        return self.waited_for or (self.done and not failed and self.rest is None)

    def wait(self, deadline: Deadline) -> list[Reply]:
        try:
            replies = [pending.wait(deadline) for pending in self.pendings]
        finally:
            self.waited_for = self.waited_for or self.done
        rest = self.rest
        if rest is not None:
            rest.bring()
            self.rest = None
        return replies


class Work:
    """A push or pull under way. Until wait() returns, its gradient and its `out` belong to the wire."""

    def __init__(self, flight: Flight, land: Landing | None) -> None:
        self._flight, self._land = flight, land
        self.version = -1
        """Updates that the table has had, once it is done; of a table on several servers, the least."""

    @property
    def done(self) -> bool:
        return self._flight.done

    def wait(self, timeout_s: float = WAIT_S) -> Any:
        """The table's values, in the kind and in the memory that was given; None after a push. Raises what went wrong."""
        replies = self._flight.wait(Deadline.after(timeout_s))
        self.version = min(int(reply.head.get("version", -1)) for reply in replies)
        return self._land.give() if self._land is not None else None


@dataclass
class Landing:
    """Where pulled values go: `flat` is what the wire fills, `out` what the caller gave."""

    flat: Tensor
    shape: tuple[int, ...]
    out: Array | None
    as_numpy: bool
    direct: bool = False
    """`flat` is `out` itself."""

    def bring(self) -> None:
        """From `flat` to an `out` that is elsewhere."""
        assert self.out is not None
        with torch.no_grad():
            torch.as_tensor(self.out).copy_(self.flat.view(self.shape))

    def give(self) -> Array:
        if self.out is not None:
            return self.out
        values = self.flat.view(self.shape)
        return values.numpy() if self.as_numpy else values


def connect(address: str | None = None, *, token: str | None = None) -> Client:
    """Connects to one parameter server or several ("HOST:PORT,HOST:PORT"), over which tables are then spread.

    `token` is the servers' token, else ECHELON_TOKEN or what the file ECHELON_TOKEN_FILE holds. Servers that are still starting are
    waited for, 30 s at most.
    """
    if address is None:
        raise UsageError(
            "echelon.ps.connect needs the address of a parameter server",
            remedy='Start one with `echelon serve` and give what it prints, such as echelon.ps.connect("127.0.0.1:4711").',
        )
    file = env.own_token_file()
    token = token or env.own_token() or (tokens.read(Path(file)) if file else None)
    if not token:
        raise UsageError(
            "echelon.ps.connect needs the servers' token",
            remedy="Set ECHELON_TOKEN_FILE to the file that `echelon serve` names, or give token=...",
        )
    tokens.check(token)
    deadline, links = Deadline.after(CONNECT_S), []
    try:
        for one in filter(None, (text.strip() for text in address.split(","))):
            links.append(Link.connect(one, token, Identity(SERVE, "cli", 0, os.getpid()), deadline))
        if not links:
            raise UsageError(f"{address!r} names no server", remedy="Give HOST:PORT, several with commas.")
        return Client(links)
    except BaseException:
        for link in links:
            link.close()
        raise


class Client:
    """Tables on one server or several. Usable from several threads. close() it, or use it in a `with`.

    Gradients and values may be tensors or NumPy arrays, on any device; what comes back is of the kind that was given. A push
    that failed raises where its Work is waited for, or in wait().
    """

    def __init__(self, links: list[Link]) -> None:
        ids = [str(link.welcome.get("id")) for link in links]
        if len(set(ids)) != len(ids):
            for link in links:
                link.close()
            raise UsageError("one server is named twice", remedy="Give each server's address once.")
        self._links = [link for _, link in sorted(zip(ids, links, strict=True), key=lambda pair: pair[0])]
        self._known: dict[str, Known] = {}
        self._lock = threading.Lock()
        self._flights: list[Flight] = []
        self._tidy_at = TIDY_AT

    def create(self, name: str, init: Array, optimizer: str = "sgd", **numbers: Number) -> None:
        """Makes a table with these first values, updated by "sgd", "adagrad", "rmsprop", "adam" or "adamw" with torch's numbers (betas
        as beta1 and beta2). Several clients may create the same table: the first one's values count, and all must agree on the rest."""
        recipe, first = Recipe(optimizer, numbers), _tensor(init)
        shape, dtype = tuple(first.shape), str(first.dtype).removeprefix("torch.")
        flat, deadline = _flat(first), Deadline.after(WAIT_S)
        parts = self._cut(name, flat)
        calls = []
        for part in parts:
            head = {
                "name": name, "shape": list(shape), "dtype": dtype, "begin": part.begin, "end": part.end,
                "optimizer": recipe.to_plain(),
            }  # fmt: skip
            calls.append(part.link.call("tables.create", head, flat[part.begin : part.end]))
        for call in calls:
            call.wait(deadline)
        self._known[name] = Known(shape, first.dtype, parts, isinstance(init, numpy.ndarray))

    def push(self, name: str, grad: Array, **numbers: Number) -> Work:
        """One update of the table by its optimizer. `numbers` (such as lr) hold for this update."""
        return self._work("push", name, grad, None, numbers)

    def pull(self, name: str, out: Array | None = None) -> Work:
        """The values, in `out` if it is given, else in memory of their own: from a server of this machine they come without a copy."""
        return self._work("pull", name, None, out, {})

    def push_pull(self, name: str, grad: Array, out: Array | None = None, **numbers: Number) -> Work:
        """One update, and the values right after it."""
        return self._work("push_pull", name, grad, out, numbers)

    def buffer(self, name: str) -> Tensor:
        """A tensor of the table's shape and type in memory that the server shares, where it is on this machine: a gradient or an `out`
        that lies there is not copied on its way. Lives as long as the client. Of a table on several servers: ordinary memory."""
        known = self._find(name)
        num_bytes = math.prod(known.shape) * known.dtype.itemsize
        if len(known.parts) > 1 or not num_bytes:
            return torch.empty(known.shape, dtype=known.dtype)
        return known.parts[0].link.buffer(num_bytes).view(known.dtype).view(known.shape)

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Everything under way; raises the first error of what nobody waited for."""
        deadline = Deadline.after(timeout_s)
        with self._lock:
            flights, self._flights = self._flights, []
        failed: EchelonError | None = None
        for flight in flights:
            if flight.settled:
                continue
            try:
                flight.wait(deadline)
            except EchelonError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def tables(self) -> dict[str, dict[str, Any]]:
        """{name: {shape, dtype, optimizer, numbers, version, servers}} of every table there is."""
        found: dict[str, dict[str, Any]] = {}
        deadline = Deadline.after(WAIT_S)
        for link in self._links:
            after = ""
            while told := link.call("tables.list", {"after": after}).wait(deadline).head["tables"]:
                for name, one in told.items():
                    about = found.setdefault(
                        name,
                        {
                            "shape": tuple(one["shape"]), "dtype": one["dtype"], "optimizer": one["optimizer"]["name"],
                            "numbers": one["optimizer"]["numbers"], "version": one["version"], "servers": 0,
                        },
                    )  # fmt: skip
                    about["servers"] += 1
                    about["version"] = min(about["version"], one["version"])
                after = max(told)
        return found

    def close(self) -> None:
        """Waits for nothing: wait() first for what must arrive."""
        for link in self._links:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    def _work(
        self, verb: str, name: str, grad: Array | None, out: Array | None, numbers: Mapping[str, Number]
    ) -> Work:
        known = self._find(name)
        head: dict[str, Any] = {"name": name, "numbers": dict(numbers)} if numbers else {"name": name}
        flat = _flat(_fitting(verb, name, grad, known)) if grad is not None else None
        land = None
        if verb != "push":
            as_numpy = known.as_numpy if grad is None else isinstance(grad, numpy.ndarray)
            land = _landing(verb, name, out, known, as_numpy)
        pendings = []
        for part in known.parts:
            span = slice(part.begin, part.end)
            payload = None if flat is None else flat if len(known.parts) == 1 else flat[span]
            room = None if land is None else land.flat if len(known.parts) == 1 else land.flat[span]
            pendings.append(part.link.call(f"tables.{verb}", head, payload, room))
        flight = Flight(pendings, land)
        self._remember(flight)
        return Work(flight, land)

    def _remember(self, flight: Flight) -> None:
        """For wait(). What is done and well is forgotten now and then."""
        with self._lock:
            self._flights.append(flight)
            if len(self._flights) >= self._tidy_at:
                self._flights = [f for f in self._flights if not f.settled]
                self._tidy_at = max(TIDY_AT, 2 * len(self._flights))

    def _cut(self, name: str, flat: Tensor) -> tuple[Part, ...]:
        """Where a new table goes: whole to one server, by its name, or in equal parts to all. The same on every client."""
        links = self._links
        if flat.nbytes < SPLIT_BYTES * len(links):
            return (Part(links[zlib.crc32(name.encode()) % len(links)], 0, flat.numel()),)
        step = ALIGN // flat.itemsize
        ends = [flat.numel() * (at + 1) // len(links) // step * step for at in range(len(links) - 1)]
        ends.append(flat.numel())
        return tuple(
            Part(link, begin, end) for link, begin, end in zip(links, [0, *ends], ends, strict=False)
        )

    def _find(self, name: str) -> Known:
        known = self._known.get(name)
        return known if known is not None else self._ask(name)

    def _ask(self, name: str) -> Known:
        """Of a table that another client made."""
        deadline, parts, failed = Deadline.after(WAIT_S), [], None
        told: dict[str, Any] = {}
        for link, call in [(link, link.call("tables.describe", {"name": name})) for link in self._links]:
            try:
                told = call.wait(deadline).head
                parts.append(Part(link, told["begin"], told["end"]))
            except UsageError as error:
                failed = failed or error
        if not parts:
            assert failed is not None
            raise failed
        parts.sort(key=lambda part: part.begin)
        shape = tuple(told["shape"])
        ends = [0, *(part.end for part in parts)]
        if [part.begin for part in parts] != ends[:-1] or ends[-1] != math.prod(shape):
            raise UsageError(
                f"table {name!r} lies on more servers than this client knows",
                remedy="Give connect() the addresses of all of them.",
            )
        self._known[name] = Known(shape, getattr(torch, told["dtype"]), tuple(parts), False)
        return self._known[name]


def _tensor(x: Array) -> Tensor:
    if isinstance(x, numpy.ndarray):
        flags = x.flags
        return torch.from_numpy(x if flags.c_contiguous and flags.writeable else numpy.array(x, order="C"))
    if not isinstance(x, Tensor):
        raise UsageError(f"a {type(x).__name__} is neither a tensor nor a NumPy array")
    return x.detach() if x.requires_grad else x


def _flat(x: Tensor) -> Tensor:
    """Contiguous, on the CPU, of one dimension. Every call of torch lets other threads of Python go first: no more than needed."""
    if x.device.type != "cpu":
        x = x.cpu()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.dim() == 1 else x.view(-1)


def _fitting(verb: str, name: str, x: Array, known: Known) -> Tensor:
    given = _tensor(x)
    if tuple(given.shape) != known.shape or given.dtype is not known.dtype:
        kind, wanted = (str(d).removeprefix("torch.") for d in (given.dtype, known.dtype))
        raise UsageError(
            f"{verb} {name!r}: a {kind} of shape {list(given.shape)} was given, and the table is {wanted} of shape {list(known.shape)}",
            remedy="Gradients and `out` have the shape and the type of their table.",
        )
    return given


def _landing(verb: str, name: str, out: Array | None, known: Known, as_numpy: bool) -> Landing:
    if out is None:
        numel, parts = math.prod(known.shape), known.parts
        if len(parts) > 1:
            flat = torch.empty(numel, dtype=known.dtype)
        else:
            flat = parts[0].link.landing(numel * known.dtype.itemsize).view(known.dtype)
        return Landing(flat, known.shape, None, as_numpy)
    if isinstance(out, numpy.ndarray) and (not out.flags.c_contiguous or not out.flags.writeable):
        raise UsageError(f"{verb} {name!r}: `out` must be a contiguous array that may be written to")
    given = _fitting(verb, name, out, known)
    direct = given.device.type == "cpu" and given.is_contiguous()
    flat = _flat(given) if direct else torch.empty(given.numel(), dtype=given.dtype)
    return Landing(flat, known.shape, out, as_numpy, direct)
