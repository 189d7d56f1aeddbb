"""The live line of a run on a terminal, plain lines elsewhere, and the one place that writes to the screen."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from echelon.clock import Clock
from echelon.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    Event,
    Facts,
    Resumed,
    ShardServed,
    StepLost,
    Warned,
    WorkersBack,
)
from echelon.show.lines import Line, fold
from echelon.show.state import Progress, number, rate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REDRAW_S = 0.25
PLAIN_EVERY_S = 10.0
STARTING_S = 5.0
"""Without a terminal: when there is no step after this long, one line says who is there."""

BAR_COLUMNS = 16
PART_STYLES = {"data": "yellow", "forward": "green", "backward": "blue", "waiting": "red"}


class Display:
    """Shows a run to a person. Feed it events (`handle` is a Sink), lines of workers, and call `tick` often.

    What the run says goes to `err`, what scripts print to `out` or `err` as they chose. `live` draws a moving line
    (default: when `err` is a terminal; `own_prints`: this process prints too, so its prints are led above that line);
    otherwise a plain line at the first step and every 10 s. `starting` also shows that workers are on their way, before
    the first step. Not thread-safe: one thread calls it. close() takes the live line away and is safe to call again.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        num_servers: int = 0,
        host: str = "",
        out: IO[str] | None = None,
        err: IO[str] | None = None,
        live: bool | None = None,
        own_prints: bool = True,
        starting: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.progress = Progress(num_workers, num_servers)
        self.broken = False
        """True when nobody reads any more (`echelon run … | head`)."""
        self.note = ""
        """What the run waits for before there are workers; shown in place of who is there."""
        self._host, self._clock = host, clock
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._live_wanted = _is_terminal(self._err) if live is None else live
        self._live: Live | None = None
        self._own_prints = own_prints
        self._began, self._starting, self._waited = clock(), starting, False
        self._next_draw = self._next_plain = 0.0
        self._last_plain = ""
        self._told: set[str] = set()
        self._alone: set[int] = set()
        """Shards without a copy."""
        self._closed = False

    @property
    def styled(self) -> bool:
        """Whether colours make sense on `err`."""
        return _is_terminal(self._err)

    def handle(self, event: Event) -> None:
        """Takes one event; prints what deserves a line of its own."""
        self.progress.take(event, self._clock())
        if isinstance(event, Facts):
            self.say(*(part for line in event.lines if self._new(line) for part in fold(line)))
        elif isinstance(event, Warned) and self._new(event.message):
            self._warn(event.message, event.rank)
        elif isinstance(event, CheckpointSaved):
            self.say(*fold(saved_line(event)))
        elif isinstance(event, ShardServed):
            self._served(event)
        elif isinstance(event, Resumed):
            workers = f"{event.saved_by} worker{'s' * (event.saved_by != 1)}"
            for line in (f"goes on from step {event.step}, saved by {workers}: {event.path}", *event.lines):
                self.say(*fold(line))
        elif isinstance(event, CheckpointFailed):
            self._warn(failed_text(event), None)
        elif isinstance(event, WorkersBack):
            who = f"worker{'s' * (len(event.ranks) != 1)} {', '.join(map(str, event.ranks))}"
            self.say(*fold(f"{who} back at step {event.step}, {event.pause_s:.1f} s after the loss"))
        elif isinstance(event, StepLost) and self._new(f"lost {event.step} {event.reason}"):
            again = f"{event.batches} batch{'es' * (event.batches != 1)} run again"
            self.say(*fold(f"step {event.step} did not meet ({event.reason}): nothing was applied, {again}"))
        elif (
            isinstance(event, EpochDone) and event.expected is not None and event.committed != event.expected
        ):
            text = f"epoch {event.epoch} committed {event.committed} of {event.expected} samples"
            if self._new(text):
                self._warn(text, event.rank)
        self.tick()

    def _served(self, event: ShardServed) -> None:
        if event.moved:
            self.say(*fold(f"{event.moved}: server {event.leader} has a copy and goes on in its place"))
        elif event.copied and event.shard in self._alone:
            self.say(
                f"server {event.partner} has a copy again of what server {event.leader} holds (shard {event.shard})"
            )
        self._alone.discard(event.shard) if event.copied else self._alone.add(event.shard)

    def lines(self, lines: Sequence[Line]) -> None:
        """Shows what workers printed."""
        for stream, file in (("out", self._out), ("err", self._err)):
            texts = [line.render(self._host) for line in lines if line.stream == stream]
            if texts:
                self._write(file, texts)

    def say(self, *texts: str) -> None:
        """Lines of the run itself."""
        if texts:
            self._write(self._err, list(texts))

    def tick(self) -> None:
        """Redraws, or prints the next plain line, if it is time."""
        now = self._clock()
        if self._closed or now < self._next_draw:
            return
        self._next_draw = now + REDRAW_S
        if self._live_wanted:
            self._draw()
        elif self.progress.step > 0 and now >= self._next_plain:
            self._next_plain = now + PLAIN_EVERY_S
            text = plain_line(self.progress)
            if text != self._last_plain:
                self._last_plain = text
                self.say(*fold(text))
        elif self._note and not self._waited and now - self._began >= STARTING_S:
            self._waited = True
            self.say(*fold(self._note))

    @property
    def _note(self) -> str:
        """What there is to say before the first step; "" when there is nothing."""
        return (
            (self.note or starting_line(self.progress)) if self._starting and self.progress.step == 0 else ""
        )

    def close(self) -> None:
        """The live line goes; lines can still be written."""
        self._closed = True
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except OSError as error:
                self._lost(error)

    def _draw(self) -> None:
        from rich.live import Live

        note = self._note
        if self.progress.step == 0 and not self.progress.phase and not note:
            return
        waited = f"{note} · {self._clock() - self._began:.0f} s" if note else ""
        if self._live is None:
            self._live = Live(
                console=_console(self._err), auto_refresh=False, transient=True,
                redirect_stdout=self._own_prints, redirect_stderr=self._own_prints,
            )  # fmt: skip
            self._live.start()
            self._live.console.show_cursor(True)  # killed at any moment, we leave a terminal that works
        try:
            self._live.update(live_lines(self.progress, waited), refresh=True)
        except OSError as error:
            self._lost(error)

    def _write(self, file: IO[str], texts: list[str]) -> None:
        try:
            if self._live is not None and _is_terminal(file):
                from rich.text import Text

                self._live.console.print(Text.from_ansi("\n".join(texts)), soft_wrap=True, highlight=False)
            else:
                file.write("".join(f"{text}\n" for text in texts))
                file.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """A reader that went away ends the run; a full disk only costs the text."""
        self.broken = self.broken or not isinstance(error, OSError) or error.errno in (errno.EPIPE, errno.EIO)

    def _warn(self, message: str, rank: int | None) -> None:
        first, *rest = message.splitlines()
        who = f" (worker {rank})" if rank is not None and self.progress.num_workers > 1 else ""
        head = f"warning{who}:"
        lines = [
            part
            for line in (f"{head} {first}", *(f"  {line.strip()}" for line in rest))
            for part in fold(line)
        ]
        if _is_terminal(self._err):
            lines[0] = lines[0].replace(head, f"\x1b[1;33m{head}\x1b[0m", 1)
        self.say(*lines)

    def _new(self, text: str) -> bool:
        fresh = text not in self._told
        self._told.add(text)
        return fresh


def plain_line(progress: Progress) -> str:
    """`step 120 · epoch 1 · loss 0.43 · 975 samples/s · data 3% forward 31% …`"""
    shares = progress.recent_split.shares()
    split = " ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return " · ".join(filter(None, [*_counters(progress), *_metrics(progress), split]))


def saved_line(event: CheckpointSaved) -> str:
    """`checkpoint at step 20: 1.2 GB in 2.3 s, training waited 4 ms (runs/x/checkpoints/step-00000020)`"""
    spent = f"{event.copy_s + event.write_s:.1f} s, training waited {1e3 * event.stall_s:.0f} ms"
    return f"checkpoint at step {event.step}: {event.num_bytes / 1e6:.3g} MB in {spent} ({event.path})"


def failed_text(event: CheckpointFailed) -> str:
    """What happened, and which older one is kept."""
    kept = f"The last complete one is kept: {event.kept}" if event.kept else "There is no older one."
    return f"the checkpoint at step {event.step} failed: {event.reason}\n{kept}"


def starting_line(progress: Progress) -> str:
    """Who is there before the first step."""
    workers, servers = progress.num_workers, progress.num_servers
    here, wanted = len(progress.beats) + len(progress.servers), workers + servers
    of = f"{workers} worker{'s' * (workers != 1)}"
    of += f" and {servers} server{'s' * (servers != 1)}" if servers else ""
    if here < wanted:
        text = f"starting {of}…" + f" {here} {'is' if here == 1 else 'are'} here" * (here > 0)
    else:
        text = f"{of} {'is' if wanted == 1 else 'are'} here, no step yet"
    return " · ".join(filter(None, [text, progress.phase and f"phase {progress.phase}"]))


def live_lines(progress: Progress, note: str = "") -> RenderableType:
    """Lines that are cut, never wrapped, at the terminal's width: counters and where the time goes, or only `note`."""
    from rich.console import Group
    from rich.text import Text

    if note:
        return Text(note, no_wrap=True, overflow="ellipsis")
    top = Text(" · ".join([*_counters(progress), *_metrics(progress)]), no_wrap=True, overflow="ellipsis")
    top.stylize("bold", 0, len(_counters(progress)[0]))
    below = Text(no_wrap=True, overflow="ellipsis")
    shares = progress.recent_split.shares()
    for name, columns in bar(list(shares.values()), BAR_COLUMNS, list(shares)):
        below.append("━" * columns, PART_STYLES.get(name, "dim"))
    for name, share in shares.items():
        below.append(f"  {name} ", PART_STYLES[name])
        below.append(f"{share:.0%}")
    return Group(top, below) if shares else Group(top)


def bar(shares: Sequence[float], columns: int, names: Sequence[str]) -> list[tuple[str, int]]:
    """Whole columns for each share, rounded so that they never exceed `columns`; the rest is named ""."""
    cells, used, total = [], 0, 0.0
    for name, share in zip(names, shares, strict=True):
        total += share
        upto = min(columns, round(total * columns))
        cells.append((name, upto - used))
        used = upto
    return [*cells, ("", columns - used)] if shares else []


def _counters(progress: Progress) -> list[str]:
    items = [f"step {progress.step}", f"epoch {progress.epoch}"]
    if progress.phase:
        items.append(f"phase {progress.phase}")
    if progress.samples_per_s:
        items.append(f"{rate(progress.samples_per_s)} samples/s")
    return items


def _metrics(progress: Progress) -> list[str]:
    names = sorted(progress.metrics, key=lambda name: name != "loss")
    return [f"{name} {number(progress.metrics[name])}" for name in names]


def _is_terminal(file: IO[str]) -> bool:
    try:
        return file.isatty() and os.isatty(file.fileno())
    except (ValueError, OSError):
        return False


def _console(file: IO[str]) -> RichConsole:
    from rich.console import Console

    return Console(file=file, highlight=False, soft_wrap=False)


if TYPE_CHECKING:
    from rich.console import Console as RichConsole
