"""How the processes of a run find servers: a server its partner (mirror.Site), a worker whoever leads a shard."""

from __future__ import annotations

import threading

from echelon.clock import Deadline
from echelon.control.member import Member
from echelon.errors import AuthError, EchelonError, LinkLost, WorldError
from echelon.ps.duty import CALL_S, NEVER, address_key
from echelon.ps.frame import TRAINING
from echelon.ps.link import Link

CONNECT_S = 1.0
TRY_S = 2.0
PAUSE_S = 0.05
FIND_S = 60.0
"""How long a shard may be without a leader."""


class RunSite:
    """See mirror.Site."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def connect(self, rank: int) -> Link | None:
        found = address_of(self.member, rank, timeout_s=0.0)
        soon = Deadline.after(CONNECT_S)
        try:
            return (
                Link.connect(found, self.member.token, self.member.identity, soon, limits=TRAINING)
                if found
                else None
            )
        except AuthError:
            raise
        except EchelonError:  # it ended, and its successor has not begun to listen
            return None

    def judge(self) -> Link:
        """To whoever leads shard 0: see judge.Court."""
        lead = self.member.call("ps.lead", Deadline.after(CALL_S), shard=0, after=-1, timeout_s=0.0)
        link = self.connect(int(lead["rank"]))
        if link is None:
            raise LinkLost(f"server {lead['rank']} cannot be reached now")
        return link

    def copied(self, shard: int, epoch: int, copied: bool) -> bool:
        return bool(
            self.member.call("ps.copied", Deadline.after(6 * CALL_S), shard=shard, epoch=epoch, copied=copied)
        )


class Finder:
    """Finds, for a worker, the server that leads a shard."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def next(self, shard: int, epoch: int) -> tuple[Link, int]:
        """Who leads it in an epoch after this one, once there is one. LinkLost when there will be none."""
        return self.find(shard, epoch, Deadline.after(FIND_S))

    def find(self, shard: int, epoch: int, deadline: Deadline) -> tuple[Link, int]:
        """A connection to the leader since an epoch later than `epoch`, and that epoch; blocks until it is there."""
        wire, pause = self.member.dial(deadline), threading.Event()
        try:
            while True:
                left = max(0.0, deadline.left_s - 1.0)
                lead = wire.call("ps.lead", deadline, shard=shard, after=epoch, timeout_s=left)
                try:
                    link = self.connect(int(lead["rank"]), deadline if epoch < 0 else deadline.sooner(TRY_S))
                    if lead["epoch"] > 0:
                        told = {"shard": shard, "epoch": lead["epoch"]}
                        link.call("train.lead", told).wait(deadline)
                    return link, int(lead["epoch"])
                except (LinkLost, WorldError):  # gone as well, perhaps: the coordinator will know
                    if epoch < 0 or deadline.left_s < TRY_S:
                        raise
                    pause.wait(PAUSE_S)
        except WorldError as error:
            raise LinkLost(error.message, remedy=error.remedy) from None
        finally:
            wire.close()

    def connect(self, rank: int, deadline: Deadline) -> Link:
        """To a server of the run, by its rank; waits for it to be there."""
        wire = self.member.dial(deadline)
        try:
            left = max(0.0, deadline.left_s - 1.0)
            found = wire.call("store.get", deadline, key=address_key(rank), timeout_s=left, term=NEVER)
        finally:
            wire.close()
        to = (bytes(found).decode(), self.member.token, self.member.identity, deadline)
        return Link.connect(*to, limits=TRAINING)


def address_of(member: Member, rank: int, timeout_s: float) -> str:
    """Where a server listens, as the run's table has it; "" if it is not there in time."""
    try:
        found = member.call(
            "store.get",
            Deadline.after(timeout_s + CALL_S),
            key=address_key(rank),
            timeout_s=timeout_s,
            term=NEVER,
        )
    except WorldError:
        return ""
    return bytes(found).decode()
