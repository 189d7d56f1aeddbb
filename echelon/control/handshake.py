"""How two processes of a run find out that both know its token, without telling it. Pure: bytes in, bytes out.

    client -> server   version, nonce, identity (run, role, rank, incarnation)
    server -> client   nonce
    client -> server   proof = HMAC(token, "client", both nonces, identity)
    server -> client   proof = HMAC(token, "server", both nonces, identity), or a refusal

Nonces are fresh on both sides, so nothing recorded is of use; the purpose is part of every HMAC, so nothing can be
sent back; the keys of the frames that follow come from the same nonces, so they belong to this connection alone.

A joiner (a further host's supervisor before it has a place) does not know the run's name yet: it leaves it empty, proves
the token all the same, and learns the name over the sealed frames. It may call only what JOINER's methods allow.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from echelon.control import frames
from echelon.errors import AuthError, WireError

VERSION = 1
NONCE_BYTES = 32
JOINER = "joiner"
ROLES = frozenset({"worker", "server", "supervisor", "cli", JOINER})
MAX_NAME_CHARS = 256

REFUSALS = {
    "token": ("it does not know this token", "Use the token of this very run: the file RUN_DIR/token that `echelon run` wrote."),
    "run": ("it belongs to another run", "Check ECHELON_COORDINATOR and ECHELON_RUN: two runs on one machine have two addresses."),
    "role": ("it has no such role", "Roles are worker, server, supervisor and cli."),
    "version": ("it speaks another version of the wire", "Install the same version of Echelon on every host."),
}  # fmt: skip
"""Why a server may refuse: fixed words, so that no text of a stranger is ever shown."""


@dataclass(frozen=True)
class Identity:
    """Who speaks. `incarnation` tells a restarted process from the one before it."""

    run: str
    role: str
    rank: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Session:
    """The keys of one authenticated connection, one a direction."""

    from_client: bytes
    from_server: bytes


class Refused(AuthError):
    """Raised inside the server; `code` is what the client is told."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(REFUSALS[code][0])


class ClientSide:
    """The client's half. Use once: hello(), prove(), finish()."""

    def __init__(self, token: str, identity: Identity) -> None:
        self._token, self._identity = token.encode(), identity
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = b""

    def hello(self) -> bytes:
        return frames.hello({"version": VERSION, "nonce": self._nonce, **asdict(self._identity)})

    def prove(self, challenge: Any) -> bytes:
        """The client's proof, for the server's nonce."""
        check_refusal(challenge)
        nonce = _take(challenge, "nonce", bytes)
        if len(nonce) != NONCE_BYTES:
            raise WireError("the server's nonce has the wrong length")
        self._transcript = _transcript(self._nonce, nonce, self._identity)
        return frames.hello({"proof": _prove(self._token, "client", self._transcript)})

    def finish(self, answer: Any) -> Session:
        """The session, once the server has shown that it knows the token as well."""
        check_refusal(answer)
        if not hmac.compare_digest(
            _take(answer, "proof", bytes), _prove(self._token, "server", self._transcript)
        ):
            raise AuthError(
                "what answers there does not know the run's token",
                remedy="Another program may have taken the port.",
            )
        return _session(self._token, self._transcript)


class ServerSide:
    """The server's half. Use once: challenge(), finish(). Refused carries the code for the client."""

    def __init__(self, token: str, run: str) -> None:
        self._token, self._run = token.encode(), run
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = b""
        self.identity = Identity("", "", 0)

    def challenge(self, hello: Any) -> bytes:
        if _take(hello, "version", int) != VERSION:
            raise Refused("version")
        nonce = _take(hello, "nonce", bytes)
        self.identity = Identity(
            *(_take(hello, key, str)[: MAX_NAME_CHARS + 1] for key in ("run", "role")),
            *(_take(hello, key, int) for key in ("rank", "incarnation")),
        )
        if len(nonce) != NONCE_BYTES or len(hello) != 6:
            raise WireError("a greeting of the wrong form")
        self._transcript = _transcript(nonce, self._nonce, self.identity)
        return frames.hello({"nonce": self._nonce})

    def finish(self, answer: Any) -> tuple[Session, bytes]:
        """The session and the last frame of the handshake. The token is judged first: strangers learn nothing else."""
        if not hmac.compare_digest(
            _take(answer, "proof", bytes), _prove(self._token, "client", self._transcript)
        ):
            raise Refused("token")
        nameless = self.identity.role == JOINER and not self.identity.run
        if self.identity.run != self._run and not nameless:
            raise Refused("run")
        if (
            self.identity.role not in ROLES
            or not 0 <= self.identity.rank < 1 << 31
            or self.identity.incarnation < 0
        ):
            raise Refused("role")
        proof = frames.hello({"proof": _prove(self._token, "server", self._transcript)})
        return _session(self._token, self._transcript), proof


def refusal(code: str) -> bytes:
    return frames.hello({"refused": code})


def check_refusal(answer: Any) -> None:
    """AuthError when the server's answer is a refusal."""
    if isinstance(answer, dict) and "refused" in answer:
        why, remedy = REFUSALS.get(str(answer["refused"]), ("it gave no known reason", ""))
        raise AuthError(f"the server refused this process: {why}", remedy=remedy)


def _take(message: Any, key: str, kind: type) -> Any:
    value = message.get(key) if isinstance(message, dict) else None
    if type(value) is not kind:
        raise WireError(f"a handshake without a proper {key!r}")
    return value


def _transcript(client_nonce: bytes, server_nonce: bytes, who: Identity) -> bytes:
    return frames.pack([VERSION, client_nonce, server_nonce, who.run, who.role, who.rank, who.incarnation])


def _prove(token: bytes, purpose: str, transcript: bytes) -> bytes:
    return hmac.new(token, frames.pack(f"echelon {purpose}") + transcript, hashlib.sha256).digest()


def _session(token: bytes, transcript: bytes) -> Session:
    return Session(
        _prove(token, "frames from client", transcript), _prove(token, "frames from server", transcript)
    )
