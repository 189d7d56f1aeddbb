"""How a run ended, for people and for the record: the first failure last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from echelon.control.roster import SERVER
from echelon.launch import lastwords
from echelon.launch.blame import Verdict
from echelon.launch.streams import tail
from echelon.show.lines import fold
from echelon.show.summary import find, measures, summary

if TYPE_CHECKING:
    from echelon.launch.supervisor import Supervisor


def finish(run: Supervisor) -> int:
    """Says how it ended, the first failure last, and writes it down."""
    verdict = run.verdict()
    told = [failed.traceback for failed in run.ends.failures]
    if run.stop is None and verdict is not None and verdict.failed is None:
        told += tail(run.folder.log(verdict.role, verdict.rank))  # the block shows it
    run.streams.finish(told)
    code, progress = run.code(), run.display.progress
    _close(run, code)
    run.folder.update(
        ended=time.time(),
        code=code,
        steps=progress.step,
        samples=progress.samples,
        metrics=progress.metrics,
        measured={
            str(rank): known for rank, beat in sorted(progress.beats.items()) if (known := measures(beat))
        },
    )
    if run.stop is not None and run.stop.block:
        run.display.say(*run.stop.block)
    elif run.stop is not None:
        step = f" at step {progress.step}" if progress.step else ""
        run.display.say("", *fold(f"run {run.plan.name}: {run.stop.reason}{step}"),
                         *(f"  {line}" for line in run.stop.detail))  # fmt: skip
    elif verdict is not None:
        run.display.say(*_block(run, verdict), *_kept(run, verdict))
    else:
        memory = {rank: end.peak_rss_bytes for rank, end in run.ends.workers.items()}
        wall_s = time.monotonic() - run.started
        servers = {rank: end.peak_rss_bytes for rank, end in run.ends.servers.items()}
        run.display.say(*summary(progress, name=run.plan.name, run_dir=run.folder.path, wall_s=wall_s,
                                  memory=memory, servers=servers, killed=run.ends.spared))  # fmt: skip
    return code


def _block(run: Supervisor, verdict: Verdict) -> list[str]:
    who, log, style = verdict.who, run.folder.log(*verdict.who), run.display.styled
    progress = run.display.progress
    beat = progress.beats.get(who.rank)
    step = progress.step if who.role == SERVER else beat.step if beat is not None else 0
    if not run.plan.is_here(who):
        end, host = run.crew.ends.get(who), run.crew.host_of(who)
        return lastwords.far(verdict, end, host=host, step=step, log=log, style=style)
    silent = verdict.exit if verdict.failed is None else None
    because = lastwords.why(silent, run.cgroups.get(who, ""), run.memory)
    if who.role == SERVER:
        because = f"Its pid was {run.folder.processes[who].pid}. {because}".strip()
    if silent is not None and silent.signal and run.plan.num_servers and who in run.ends.stays_away:
        because = f"{because} It was not started again: {run.ends.stays_away[who]}.".strip()
    return lastwords.here(verdict, host=run.plan.host, step=step, log=log, because=because, style=style)


def _kept(run: Supervisor, verdict: Verdict) -> list[str]:
    """Somebody was killed: what there is to go on from."""
    saved = run.display.progress.saved
    if verdict.failed is not None or saved is None:
        return []
    name = find(run.plan.name, run.folder.path)
    return fold(f"the last complete checkpoint is of step {saved.step}: add --resume={name} to go on from it")


def _close(run: Supervisor, code: int) -> None:
    """processes.json says of everybody how it ended."""
    for process in run.folder.processes.values():
        if process.code is None:
            process.code, process.ended = (code if process.role == "supervisor" else 0), time.time()
            run.folder.put(process)
