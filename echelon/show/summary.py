"""What stays on the screen when a run is over: steps, speed, where the time went, and where to look further. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon import env
from echelon.events import Beat, Serving
from echelon.show.lines import fold
from echelon.show.state import PARTS, Progress, duration, number, rate, split_of

MAX_RANKS = 8


def summary(
    progress: Progress, *, name: str, run_dir: Path, wall_s: float, memory: Mapping[int, int],
    servers: Mapping[int, int] | None = None, killed: Sequence[int] = (),
) -> list[str]:  # fmt: skip
    """The lines of the end of run `name`; `memory` is each worker's peak in bytes, `servers` each server's; `killed` are workers
    without which the others went on."""
    lines = [f"run {name} finished in {duration(wall_s)}"]
    if progress.step:
        lines.append(f"  {_work(progress)}")
    if progress.metrics:
        lines += fold(f"  {_last(progress)}")
    if progress.step:
        lines += [f"  {line}" for line in [*table(progress, memory), *_traffic(progress)]]
        lines += measured(progress.beats)
    lines += skipped(progress.skipped)
    lines += restarts(progress)
    if servers:
        lines += fold(
            "  " + " · ".join(_server(progress.servers.get(r), r, servers[r]) for r in sorted(servers))
        )
        lines += staleness(progress.servers.values())
        lines += fold("  " + said) if (said := dealt(progress.servers.values(), killed)) else []
    return [
        *lines,
        f"  folder {short(run_dir)}",
        f"  logs: echelon logs {shlex.quote(find(name, run_dir))} --rank 0",
    ]


def closing(progress: Progress) -> list[str]:
    """The last words of a script under plain python; none when it did not train."""
    if not progress.step:
        return []
    return fold(" · ".join([f"trained {_work(progress)}", *([_last(progress)] if progress.metrics else [])]))


def table(progress: Progress, memory: Mapping[int, int]) -> list[str]:
    """A row for each worker, at most 80 columns wide."""
    head = ["worker", "steps", "samples", *PARTS, "memory"]
    rows = [head]
    ranks = sorted({*progress.beats, *progress.left})
    for rank in ranks[:MAX_RANKS]:
        beat = progress.beats.get(rank)
        shares = split_of(beat).shares() if beat is not None else {}
        steps = max(progress.left.get(rank, 0), beat.step if beat is not None else 0)
        peak = memory.get(rank) or (beat.peak_rss_bytes if beat is not None else 0)
        rows.append([
            str(rank), f"{steps:,}", f"{progress.samples_of(rank):,}" if beat is not None else "-",
            *(f"{shares[part]:.0%}" if shares else "-" for part in PARTS), _memory(peak),
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ranks) > MAX_RANKS:
        lines.append(f"… and {len(ranks) - MAX_RANKS} more workers: echelon status shows them")
    return lines


MEASURED = ("step_bytes", "step_bytes_expected", "peak_bytes", "peak_bytes_expected", "activation_bytes")
"""What a worker measured of its steps, and what was expected: as in the event Beat."""


def measures(beat: Beat) -> dict[str, float]:
    """What is known of them."""
    return {key: getattr(beat, key) for key in MEASURED if getattr(beat, key) is not None}


def measured(beats: Mapping[int, Beat]) -> list[str]:
    """What a step moved and how much memory was needed, each where it was most, beside what was predicted for that worker."""
    moved = {rank: beat.step_bytes for rank, beat in beats.items() if beat.step_bytes}
    peaks = {rank: beat.peak_bytes for rank, beat in beats.items() if beat.peak_bytes}
    lines = []
    if moved:
        rank = max(moved, key=lambda r: moved[r])
        lines.append(_beside("a step moves", _amount, moved[rank], beats[rank].step_bytes_expected, rank, ""))
    if peaks:
        rank = max(peaks, key=lambda r: peaks[r])
        apart = " before activations" if beats[rank].activation_bytes is None else ""
        lines.append(
            _beside("memory, at most", _memory, peaks[rank], beats[rank].peak_bytes_expected, rank, apart)
        )
    return lines


def _beside(
    what: str, said: Callable[[Any], str], found: float, expected: float | None, rank: int, apart: str
) -> str:
    """`  a step moves 33.6 MB (worker 1; predicted 33.5 MB)`"""
    predicted = f"; predicted {said(expected)}{apart}" if expected is not None else ""
    return f"  {what} {said(found)} (worker {rank}{predicted})"


def skipped(count: int) -> list[str]:
    """Updates that nobody made; nothing to say if there were none."""
    if not count:
        return []
    return [
        f"  {count:,} update{'s' * (count > 1)} skipped: {'their' if count > 1 else 'its'} gradients were not finite"
    ]


def restarts(progress: Progress) -> list[str]:
    """How often workers were started again; nothing to say if none was."""
    if not progress.restarts:
        return []
    were = "workers were" if progress.restarts > 1 else "worker was"
    return [
        f"  {progress.restarts} {were} started again; the run stood still for {duration(progress.paused_s)}"
    ]


def _traffic(progress: Progress) -> list[str]:
    """What compress saved; nothing to say without it."""
    sent = sum(beat.sent_bytes for beat in progress.beats.values())
    plain = sum(beat.plain_bytes for beat in progress.beats.values())
    if sent == plain or not progress.step:
        return []
    a_step, saved = _amount(sent / progress.step), _amount((plain - sent) / progress.step)
    return [f"gradients: {a_step} sent a step, {saved} saved by compress ({plain / max(sent, 1):.1f} ×)"]


def _server(told: Serving | None, rank: int, peak: int) -> str:
    said = [f"server {rank}: {_memory(peak)}"]
    return ", ".join([*said, *work_of(told)] if told is not None else said)


def work_of(told: Serving) -> list[str]:
    """What a server did: `1,200 updates (84/s)`, `31.2 MB in`, `29.9 MB out (5.1 MB/s)`; [] if nothing."""
    if not told.updates + told.sums:
        return []
    count, what = (told.updates, "updates") if told.updates else (told.sums, "sums")
    pace = f" ({rate(count / told.busy_s)}/s)" if told.busy_s else ""
    flow = f" ({_amount((told.bytes_in + told.bytes_out) / told.busy_s)}/s)" if told.busy_s else ""
    return [f"{count:,} {what}{pace}", f"{_amount(told.bytes_in)} in", f"{_amount(told.bytes_out)} out{flow}"]


def staleness(servers: Iterable[Serving]) -> list[str]:
    """How old the parameters were that gradients were computed on, as numbers and as a histogram; nothing to say where they never are."""
    worst = max((s for s in servers if s.stale), key=lambda s: s.stale[2], default=None)
    if worst is None or worst.stale[2] == 0:
        return []
    p50, p99, most = worst.stale
    lines = [
        f"  gradients were behind by {p50} update{'s' * (p50 != 1)} (median), {p99} (99 %), {most} at most"
    ]
    total = sum(worst.behind.values())
    shares = [f"{_class(int(low))}: {_share(count / total)}" for low, count in worst.behind.items()]
    return lines + (fold("  parts by updates behind  " + " · ".join(shares)) if shares else [])


def _class(low: int) -> str:
    return str(low) if low < 2 else f"{low}-{2 * low - 1}"


def _share(share: float) -> str:
    return "< 1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


def dealt(told: Iterable[Serving], killed: Sequence[int] = ()) -> str:
    """What was computed and not used, and who is gone: where workers take batches by themselves. Whichever server dealt last counts on
    from what the one before it knew."""
    said = [f"worker {rank} was killed, the others went on without it" for rank in killed]
    servers = list(told)
    dropped = max((one.dropped for one in servers), default=0)
    returned = max((one.returned for one in servers), default=0)
    if dropped:
        said.append(f"{dropped:,} dropped parts: too late for their step, dealt again")
    if returned:
        said.append(f"{returned:,} batches of killed workers were dealt again")
    return " · ".join(said)


def _last(progress: Progress) -> str:
    names = sorted(progress.metrics, key=lambda key: key != "loss")
    return "last " + ", ".join(f"{key} {number(progress.metrics[key])}" for key in names)


def _work(progress: Progress) -> str:
    text = f"{progress.step:,} step{'s' * (progress.step != 1)}"
    if progress.samples:
        text += f", {progress.samples:,} sample{'s' * (progress.samples != 1)}"
        busy = max((beat.total_s for beat in progress.beats.values()), default=0.0)
        if busy > 0:
            text += f", {rate(progress.samples / busy)} samples/s"
    return text


def _amount(num_bytes: float) -> str:
    if 0 < num_bytes < 1e3:
        return "under 1 kB"
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def _memory(count: int) -> str:
    if not count:
        return "-"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def find(name: str, run_dir: Path) -> str:
    """What `echelon logs` and `status` find the run by: its name, or its folder when it lies elsewhere."""
    return name if run_dir == (env.runs_dir() / name).resolve() else short(run_dir)


def short(path: Path) -> str:
    """The path as seen from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
