"""A call and its answer as values: how errors travel, and how arguments are checked before a method sees them. Pure.

{"id": 7, "method": "store.add", "args": {"key": "k", "amount": 1}}
{"id": 7, "result": 1}   or   {"id": 7, "error": {"type", "message", "remedy", "peers"}}
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from echelon import errors
from echelon.control.handshake import Identity
from echelon.errors import EchelonError, UsageError, WireError

Method = Callable[..., Awaitable[Any]]
"""`async def method(peer: Identity, **args)`: annotated, so that arguments can be checked."""

ERRORS: Mapping[str, type[EchelonError]] = {
    kind.__name__: kind
    for kind in (
        errors.StrategyError,
        errors.UsageError,
        errors.WorldError,
        errors.AuthError,
        errors.PeerLost,
        errors.PhaseFailed,
        errors.LoopError,
        errors.WireError,
    )
}
"""The only classes that a name from the wire can become."""

MAX_TEXT_CHARS = 1 << 14


@dataclass(frozen=True)
class Request:
    id: int
    method: str
    args: dict[str, Any]


def read_request(value: Any) -> Request:
    """A call as it came over the wire; WireError when it is not one."""
    if not isinstance(value, dict) or set(value) != {"id", "method", "args"}:
        raise WireError("a frame is not a call")
    if (
        type(value["id"]) is not int
        or not isinstance(value["method"], str)
        or not isinstance(value["args"], dict)
    ):
        raise WireError("a call of the wrong form")
    return Request(value["id"], value["method"], value["args"])


def error_answer(id: int, error: EchelonError) -> dict[str, Any]:
    """The answer that makes the caller raise `error`, by the nearest name it knows."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), "EchelonError")
    about = {"type": name, "message": error.message[:MAX_TEXT_CHARS], "remedy": error.remedy[:MAX_TEXT_CHARS]}
    return {"id": id, "error": {**about, "peers": list(error.peers)}}


def read_answer(value: Any, id: int) -> Any:
    """The result of call `id`, or its error raised; WireError when this is not its answer."""
    if not isinstance(value, dict) or value.get("id") != id:
        raise WireError("an answer to another call came")
    error = value.get("error")
    if error is None:
        return value.get("result")
    if not isinstance(error, dict):
        raise WireError("an error of the wrong form came")
    kind = ERRORS.get(str(error.get("type")), EchelonError)
    peers = error.get("peers")
    ranks = tuple(p for p in peers if type(p) is int) if isinstance(peers, list) else ()
    raise kind(str(error.get("message")), remedy=str(error.get("remedy") or ""), peers=ranks)


class Signature:
    """What a method takes, read once from its annotations."""

    def __init__(self, name: str, method: Method) -> None:
        hints = get_type_hints(method)
        taken = list(inspect.signature(method).parameters.values())[1:]
        self.name = name
        self.hints = {p.name: hints[p.name] for p in taken}
        self.needed = {p.name for p in taken if p.default is inspect.Parameter.empty}

    def check(self, args: Mapping[str, Any]) -> None:
        """UsageError unless `args` can be handed to the method."""
        unknown, missing = sorted(set(args) - set(self.hints)), sorted(self.needed - set(args))
        if unknown or missing:
            what = f"does not take {unknown[0][:80]!r}" if unknown else f"needs {missing[0]!r}"
            raise UsageError(f"{self.name} {what}", remedy=f"It takes {', '.join(self.hints) or 'nothing'}.")
        for name, value in args.items():
            if not fits(value, self.hints[name]):
                spelled = getattr(self.hints[name], "__name__", str(self.hints[name]))
                raise UsageError(f"{self.name}: {name} must be {spelled}, not {type(value).__name__}")


def fits(value: Any, hint: Any) -> bool:
    """Is `value`, which came over a wire, of the annotated type? An int is a float, a bool is neither."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        inner = get_args(hint)[1]
        return isinstance(value, dict) and all(
            isinstance(k, str) and fits(v, inner) for k, v in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def may(peer: Identity, roles: frozenset[str] | None, method: str) -> None:
    """UsageError unless `peer` has one of `roles` (None: everyone)."""
    if roles is not None and peer.role not in roles:
        raise UsageError(
            f"a {peer.role} may not call {method}", remedy=f"It is for: {', '.join(sorted(roles))}."
        )
