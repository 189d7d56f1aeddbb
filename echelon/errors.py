"""Every error that Echelon raises on purpose.

    EchelonError
    ├── StrategyError        a knob that does not exist, is repeated, or contradicts another (exit 2)
    ├── UsageError           a call that cannot mean anything: the message says which call would (exit 2)
    ├── WorldError           the ranks could not find each other (exit 69)
    │   └── AuthError        somebody without the run's token
    ├── PeerLost             a peer is gone and the policy says stop: always a consequence, never the cause
    ├── PhaseFailed          the body of a named phase failed on rank 0: a consequence as well
    ├── LoopError            ranks are no longer at the same place of the script
    ├── NotFinite            a gradient that is not finite, and the strategy refuses it
    ├── NoRoom               training cannot fit a worker's memory: told before the kernel kills it
    ├── CheckpointError      a checkpoint that cannot be written, or is not one that can be read
    ├── WireError            a frame that is too long, torn, out of order or not ours
    ├── LinkLost             the connection to a parameter server is gone: a consequence of what ended it
    └── Late                 an answer did not come by its deadline

Each carries what a person asks next: which rank, which step, which peers, and what to do.
"""

from __future__ import annotations


class EchelonError(Exception):
    """What happened (first line), why it may be, what to do (`remedy`, printed last)."""

    exit_code = 1
    consequence = False
    """True when this error only says that some other rank failed first."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        rank: int | None = None,
        step: int | None = None,
        peers: tuple[int, ...] = (),
    ) -> None:
        self.message, self.remedy, self.rank, self.step, self.peers = message, remedy, rank, step, peers
        super().__init__(message if not remedy else f"{message}\n  {remedy}")


PREEMPTED = 75


class Preempted(SystemExit):
    """No error: the script ends here because the run was asked to stop, with a complete checkpoint (exit 75)."""


class StrategyError(EchelonError):
    exit_code = 2


class UsageError(EchelonError):
    exit_code = 2


class WorldError(EchelonError):
    exit_code = 69


class AuthError(WorldError):
    pass


class PeerLost(EchelonError):
    consequence = True


class PhaseFailed(EchelonError):
    consequence = True


class LoopError(EchelonError):
    pass


class NotFinite(EchelonError):
    pass


class NoRoom(EchelonError):
    pass


class CheckpointError(EchelonError):
    pass


class WireError(EchelonError):
    pass


class LinkLost(EchelonError):
    consequence = True


class Late(EchelonError):
    pass
