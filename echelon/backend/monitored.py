"""The monitored barrier: rank 0 looks who came, through the store, and tells everybody who did not."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from echelon.backend.request import OperationLost
from echelon.clock import Deadline

GO = "go"


def barrier(store: Store, rank: int, size: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Blocks until all ranks have come or the time is over; then raises on every rank that did come.

    Rank 0 stops at the first rank that is missing, or names all of them with `wait_all_ranks`.
    """
    deadline = Deadline.after(timeout_s)
    if rank:
        store.set(str(rank), "here")
        if not _comes(store, "verdict", deadline):
            raise _error(
                f"Rank {rank} did not hear from rank 0 in the monitored barrier within {timeout_s * 1000:.0f} ms"
            )
        verdict = store.get("verdict").decode()
        if verdict != GO:
            raise _error(verdict)
        return
    if deadline.passed:
        store.set("verdict", f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms")
        raise _error(store.get("verdict").decode())
    missing: list[int] = []
    for other in range(1, size):
        if not _comes(store, str(other), deadline):
            missing.append(other)
            if not wait_all_ranks:
                break
    who = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, missing))}"
    verdict = f"{who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms" if missing else GO
    store.set("verdict", verdict)
    if missing:
        raise _error(verdict)


def _comes(store: Store, key: str, deadline: Deadline) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline.left_s)))
    except RuntimeError:
        return False
    return True


def _error(message: str) -> OperationLost:
    return OperationLost(message, remedy="Look at that rank's own output: it died, or waits elsewhere.")
