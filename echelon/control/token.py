"""The run's token: 256 random bits that every socket of the run asks for, kept in a file only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from echelon.errors import AuthError

MIN_CHARS = 16


def make() -> str:
    """A fresh token: 64 hexadecimal digits from the system's random source."""
    return secrets.token_hex(32)


def check(token: str) -> str:
    """`token`, when it is long enough to protect something; AuthError otherwise."""
    if len(token) < MIN_CHARS:
        raise AuthError(
            f"ECHELON_TOKEN has {len(token)} characters, too few to protect anything",
            remedy="Use a long random one, such as `openssl rand -hex 32` gives, or leave it out.",
        )
    return token


def write(path: Path, token: str) -> None:
    """Puts `token` into a new file with mode 0600. A file (or link) that is already there is replaced, never followed."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")


def read(path: Path) -> str:
    """The token in `path`; AuthError when it is missing, empty, or open to other users."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise AuthError(
            f"the token file {path} cannot be read: {error.strerror}",
            remedy="Give the file that the run wrote (RUN_DIR/token) with --token-file or ECHELON_TOKEN_FILE.",
        ) from None
    with os.fdopen(fd) as file:
        about = os.fstat(file.fileno())
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise AuthError(
                f"the token file {path} is open to other users (mode {stat.S_IMODE(about.st_mode):04o})",
                remedy=f"Close it with `chmod 600 {path}`, or start the run again for a fresh token.",
            )
        token = file.read(4096).strip()
    if not token:
        raise AuthError(f"the token file {path} is empty", remedy="Start the run again for a fresh token.")
    return token
