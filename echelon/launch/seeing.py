"""What a host's supervisor sees of its workers' and servers' processes and they cannot say: stopped, held by the kernel, their CPU time.

A thread beside the supervisor's loop tells the coordinator once a second, and is told whose stack is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from echelon.clock import Deadline
from echelon.control import stacks
from echelon.control.member import Member
from echelon.control.rpc import Client
from echelon.errors import EchelonError
from echelon.launch import guard

LOOK_S = 1.0
TELL_S = 5.0
STACK_S = 1.0
MAX_LOADERS = 8


class Seeing:
    """Looks until close(). `pids` gives {Who.key: pid} of this host's workers and servers; `member` None while not joined."""

    def __init__(self, pids: Callable[[], dict[str, int]], member: Callable[[], Member | None]) -> None:
        self._pids, self._member = pids, member
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="echelon-see", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _look(self) -> None:
        wire: Client | None = None
        wanted: dict[str, str] = {}
        while not self._over.wait(LOOK_S):
            member = self._member()
            if member is None:
                continue
            pids = self._pids()
            told = {key: list(state) for key, pid in pids.items() if (state := stacks.state(pid))}
            found = {
                key: stack
                for key, whose in wanted.items()
                if key in pids and (stack := stack_of(pids[key], whose))
            }
            try:
                wire = wire or member.dial(Deadline.after(TELL_S))
                answer = wire.call("seen", Deadline.after(TELL_S), ranks=told, stacks=found)
                wanted = dict(answer["wanted"])
            except EchelonError:
                wanted = {}
        if wire is not None:
            wire.close()


def stack_of(pid: int, whose: str) -> list[str]:
    """The stack of this worker's process, or of one of its "loaders": one that is at a sample, else one that answers."""
    if whose != "loaders":
        return stacks.ask(pid, Deadline.after(STACK_S))
    deadline, other = Deadline.after(2 * STACK_S), list[str]()
    for child in sorted(guard.descendants(pid))[:MAX_LOADERS]:
        stack = stacks.ask(child, deadline.sooner(STACK_S))
        if any("/torch/utils/data/_utils/fetch.py:" in frame for frame in stack):
            return [*stack, f"(loader process {child})"]
        if any("/torch/utils/data/_utils/worker.py:" in frame for frame in stack):
            other = other or [*stack, f"(loader process {child}, at no sample)"]
    return other
