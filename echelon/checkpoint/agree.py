"""Complete everywhere or nowhere: how ranks that have written their files come to one verdict.

Every rank leaves a note of what it wrote. Rank 0 looks whether all of it is there, takes the word "commit" (from
then on nobody else can call it off), writes the manifest and says "done". Whoever fails before says so first:
the topic "fate" is settled once, by the first word. So files are removed only when no manifest can name them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.checkpoint.meeting import Meeting
from echelon.checkpoint.store import Store
from echelon.clock import Deadline
from echelon.errors import CheckpointError, EchelonError

COMMIT = b"commit"
COMPLETE = b"complete"
LOOK_S = 0.5
"""How soon a rank that waits learns that another failed."""

AGREE_S = 1800.0
"""How long a rank that has written waits for the others."""

SEE_S = 5.0
"""How long a network file system may take to show rank 0 what another host wrote."""

Note = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """How a checkpoint ended. `removable`: no manifest names the files of this attempt, now or later."""

    complete: bool
    reason: str = ""
    removable: bool = False


class Agreement:
    """One attempt at one checkpoint, as seen by one rank. Blocks; for a background thread."""

    def __init__(self, meeting: Meeting, topic: str, rank: int) -> None:
        self._meeting, self._topic, self._rank = meeting, topic, rank
        self.heard = False
        """Rank 0 has a note of everybody: so they are done with whatever came before this checkpoint."""

    def forget(self) -> None:
        """Rank 0: everybody is done with this checkpoint."""
        for name in ("fate", "done", "objects"):
            self._meeting.forget(f"{self._topic}/{name}")
        if not self.heard:
            self._meeting.drop_notes(f"{self._topic}/notes")

    def first_objects(self, digest: str, deadline: Deadline) -> str:
        """Rank 0 gives the digest of its objects; the others get it, to see whether theirs are the same."""
        topic = f"{self._topic}/objects"
        if self._rank == 0:
            self._meeting.settle(topic, digest.encode())
            return digest
        while not deadline.passed:
            word = self._meeting.settled(topic, deadline.sooner(LOOK_S))
            if word is not None:
                return word.decode()
            self.look()
        raise CheckpointError(f"rank 0 said nothing about this checkpoint within {AGREE_S:g} s")

    def look(self) -> None:
        """Raises CheckpointError with the reason once somebody has called it off."""
        word = self._meeting.settled(f"{self._topic}/fate", Deadline.after(0.0))
        if word is not None and word != COMMIT:
            raise CheckpointError(word.decode())

    def call_off(self, reason: str) -> Verdict:
        """This rank cannot go on. Gives what holds: the first reason, or that rank 0 is already committing."""
        try:
            word = self._meeting.settle(f"{self._topic}/fate", reason.encode())
        except EchelonError:
            return Verdict(False, reason)
        if word == COMMIT:
            return self._stopped_committing(reason) if self._rank == 0 else Verdict(False, reason)
        return Verdict(False, word.decode(), removable=True)

    def _stopped_committing(self, reason: str) -> Verdict:
        """Rank 0 took the word "commit" (its answer may have got lost) and wrote no manifest: the others wait for its next."""
        with contextlib.suppress(EchelonError):
            self._meeting.settle(f"{self._topic}/done", reason.encode())
            return Verdict(False, reason, removable=True)
        return Verdict(False, reason)

    def follow(self, note: Note) -> Verdict:
        """Every rank but 0: leaves the note and waits for the verdict."""
        self._meeting.tell(f"{self._topic}/notes", _pack(note))
        deadline = Deadline.after(AGREE_S)
        word = self._meeting.settled(f"{self._topic}/fate", deadline)
        if word is None:
            return self.call_off(f"rank {self._rank} heard nothing from rank 0 for {AGREE_S:g} s")
        if word != COMMIT:
            return Verdict(False, word.decode(), removable=True)
        done = self._meeting.settled(f"{self._topic}/done", deadline)
        if done is None:
            return Verdict(False, f"rank 0 began to commit and said no more for {AGREE_S:g} s")
        return Verdict(True) if done == COMPLETE else Verdict(False, done.decode(), removable=True)

    def lead(self, note: Note, commit: Callable[[list[Note]], Callable[[], None]]) -> Verdict:
        """Rank 0: collects the notes; `commit(notes)` checks them and gives what writes the manifest."""
        topic = f"{self._topic}/notes"
        self._meeting.tell(topic, _pack(note))
        deadline = Deadline.after(AGREE_S)
        while (packed := self._meeting.heard(topic, deadline.sooner(LOOK_S))) is None:
            self.look()
            if deadline.passed:
                return self.call_off(f"not all ranks had written their files within {AGREE_S:g} s")
        self.heard = True
        write = commit([_unpack(one) for one in packed])
        word = self._meeting.settle(f"{self._topic}/fate", COMMIT)
        if word != COMMIT:
            return Verdict(False, word.decode(), removable=True)
        try:
            write()
        except Exception as error:
            reason = f"rank 0: {error}"
            self._meeting.settle(f"{self._topic}/done", reason.encode())
            return Verdict(False, reason, removable=True)
        with contextlib.suppress(EchelonError):  # it is complete, whoever hears it
            self._meeting.settle(f"{self._topic}/done", COMPLETE)
        return Verdict(True)


def see_files(store: Store, folder: str, notes: list[Note]) -> None:
    """Raises CheckpointError unless every file that a rank says it wrote is in this rank's folder, whole."""
    deadline = Deadline.after(SEE_S)
    while missing := _missing(store.list(folder), notes):
        if deadline.passed:
            rank, name, found = missing[0]
            note, mine = notes[rank], notes[0]
            where = f"{note['path']}/{name}"
            seen = "does not see it" if found is None else f"sees {found} of {note['files'][name]} bytes"
            raise CheckpointError(
                f"rank {rank} on {note['host']} wrote {where}, and rank 0 on {mine['host']} {seen} in {mine['path']}",
                remedy="checkpoint_dir must be a folder that all hosts share (NFS, …), or a URL such as s3://bucket/run.",
            )
        threading.Event().wait(LOOK_S)


def _missing(found: Mapping[str, int | None], notes: list[Note]) -> list[tuple[int, str, int | None]]:
    return [
        (rank, name, found.get(name))
        for rank, note in enumerate(notes)
        for name, num_bytes in note["files"].items()
        if found.get(name) != num_bytes
    ]


def _pack(note: Note) -> bytes:
    return zlib.compress(json.dumps(note, separators=(",", ":")).encode(), 1)


def _unpack(packed: bytes) -> Note:
    return dict(json.loads(zlib.decompress(packed)))
