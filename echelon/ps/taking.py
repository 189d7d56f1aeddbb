"""A worker's side of dealing: the next piece of an epoch, asked for one ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from echelon.clock import Deadline
from echelon.errors import Late, LinkLost
from echelon.ps.desk import Desk
from echelon.ps.pending import Pending

MOMENT_S = 0.02
"""How long a loader with other batches under way waits for the answer of a question that it just asked."""


class Taker:
    """The pieces of one epoch of one loader, as this worker gets them (data.deal.Takes).

    `before_wait` is called before this worker waits for a piece: what it did so far must count by then.
    """

    def __init__(
        self, desk: Desk, feed: int, epoch: int, total: int | None, low: int, above: Sequence[int]
    ) -> None:
        self.desk = desk
        desk.epochs[feed] = self
        self.key = {"feed": feed, "epoch": epoch}
        self.total = total
        self.low, self.began = low, (low, list(above))
        self.over = False
        self.before_wait: Callable[[], None] = lambda: None
        self.after_wait: Callable[[], None] = lambda: None
        self.tells = True
        """Whether this worker tells what is done; where updates are the first parts, the server knows."""
        self.open: list[int] = []
        """Pieces that this worker has and has not told to be done."""
        self.finished: list[int] = []
        """What it told."""
        self._asked: Pending | None = None

    def known(self) -> list[Any]:
        asked = self._asked
        ahead = (
            asked.wait(Deadline.after(0)).head
            if asked is not None and asked.done and not asked.failed
            else {}
        )
        has = [*self.open, *([ahead["piece"]] if "piece" in ahead else [])]
        return [self.key["feed"], self.key["epoch"], self.total, self.finished, has]

    def take(self, wait: bool) -> int | None:
        """The next piece; None for none now (without `wait`), or none any more (`over`)."""
        if self.over:
            return None
        reply = None
        waits = False
        while reply is None:
            asked = self._asked = self._asked or self._ask(idle=wait)
            if asked is None:
                continue
            if not asked.done and not wait:
                try:
                    asked.wait(Deadline.after(MOMENT_S))
                except Late:
                    return None
                except LinkLost:
                    pass
            elif not asked.done and not waits:
                waits = True
                self.before_wait()
                self._tell(list(self.open))  # nothing of it will be trained on before there is another piece
                self.desk.tell("deal.idle", self.key)
            reply = self.desk.wait(asked, "the next batch that is to be dealt")
            self._asked = None
        if reply.head.get("over"):
            self.over = True
            self.desk.live = tuple(int(rank) for rank in reply.head.get("live", self.desk.live))
            return None
        self.low = int(reply.head["low"])
        number = int(reply.head["piece"])
        self.open.append(number)
        self._asked = self._ask(idle=False)
        if waits:
            self.after_wait()
        return number

    def _ask(self, idle: bool) -> Pending | None:
        low, above = self.began
        head = {**self.key, "idle": idle, "total": self.total, "low": low, "above": above}
        try:
            return self.desk.link.call("deal.take", head)
        except LinkLost:
            if idle:
                self.desk.again()
            return None

    def ended(self, total: int) -> None:
        """The data has so many pieces: those behind it are none."""
        self.total = total
        self.open = [number for number in self.open if number < total]
        self.desk.tell("deal.end", {**self.key, "total": total})

    def done(self, pieces: Sequence[int], samples: int = 0) -> None:
        """They are in updates, with so many samples. Does not wait."""
        if self.tells:
            self._tell(pieces, samples)
        self.open = [number for number in self.open if number not in pieces]

    def drop(self, pieces: Sequence[int]) -> None:
        """They came too late for their step and are dealt again, perhaps to this worker: until it takes them again it has nothing to tell
        of them."""
        self.open = [number for number in self.open if number not in pieces]

    def _tell(self, pieces: Sequence[int], samples: int = 0) -> None:
        mine = [number for number in pieces if number in self.open]
        if mine:
            self.open = [number for number in self.open if number not in mine]
            self.finished += mine
            self.desk.samples += samples
            self.desk.tell("deal.done", {**self.key, "pieces": mine, "samples": self.desk.samples})

    def leave(self) -> None:
        """The loop was left: others may have what this worker did not use."""
        if not self.over:
            self.over, self.open = True, []
            self.desk.tell("deal.leave", self.key)

    def state(self) -> tuple[int, list[int]]:
        """(low, above): which pieces are done now."""
        reply = self.desk.ask("deal.state", self.key, what="which batches are done")
        if reply.head["over"]:
            return (self.total if self.total is not None else 1 << 53), []
        if not reply.head["known"]:
            return self.began
        return int(reply.head["low"]), [int(n) for n in reply.head["above"]]
