"""The process that a person starts: it starts the others, shows what they say, and sees to it that all of it ends.

The order of a run:
    1. start: the coordinator's socket, the guard, coordinator, servers and workers
    2. watch: one loop over output, exits, events and signals
    3. settle: after a first failure the others get a second to say what they know
    4. end: servers are sent home, the guard ends the tree; then the summary, or the first failure as the last lines
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from echelon import env
from echelon.clock import Deadline
from echelon.control.roster import SERVER, WORKER, Who
from echelon.elastic.hosts import Seat
from echelon.events import Event, Failed, ProcessEnded, ProcessStarted, RunEnded, RunStarted, Sink
from echelon.launch import blame, cause, crew, finish, guard, lastwords, restart
from echelon.launch.asked import Asked, Stop, Waker
from echelon.launch.blame import Exit, Verdict
from echelon.launch.crew import Crew
from echelon.launch.ends import IN_ORDER, Ends
from echelon.launch.link import Link
from echelon.launch.local import JOIN_TIMEOUT_S, Plan, RoleSpec
from echelon.launch.meeting import Assembly
from echelon.launch.patience import Patience
from echelon.launch.preempt import Preempting
from echelon.launch.rundir import Process, RunDir, start_ticks
from echelon.launch.seeing import Seeing
from echelon.launch.streams import Screen, Streams, tail
from echelon.launch.tether import Tether
from echelon.show.lines import fold
from echelon.show.progress import Display

TICK_S = 0.1
GRACE_S = 1.0
END_S = 6.0


class Supervisor:
    """One run on this machine. `run()` blocks until nothing of it is left and gives its exit code."""

    def __init__(
        self, plan: Plan, folder: RunDir, listening: socket.socket | None, display: Display, sinks: Sequence[Sink] = (),
        hosts: Crew | None = None, token: str | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.folder, self.display = plan, folder, display
        self.listening, self.sinks = listening, sinks
        self.crew, self.token = hosts or Crew(), token
        self.selector = selectors.DefaultSelector()
        self.streams = Streams(folder, self.selector, self._screen(), plan.num_local)
        self.ends = Ends(folder.read().get("strategy", {}))
        self.cgroups: dict[Who, str] = {}
        self.stop: Stop | None = None
        self.preempting = Preempting(plan.grace_s, plan.again, self._stopping)
        self.failing_since: float | None = None
        self.done_since: float | None = None
        self.ending_since: float | None = None
        self.tree_ending_since: float | None = None
        self.workers_since: float | None = None
        self.ended = self.hurried = False
        self.asked = Asked()
        self.patience = Patience(folder.read().get("strategy", {}), lambda who: str(lastwords.short(folder.log(*who))),
                                 lambda: self.display.styled)  # fmt: skip
        self.incarnations: dict[str, int] = {}
        self.coordinator_ends: list[float] = []
        self.waker = Waker()

    def run(self) -> int:
        self.started = time.monotonic()
        self.memory = cause.read(cause.cgroup_of())
        guard.become_subreaper()
        spare = frozenset(guard.descendants(os.getpid()))
        with self.asked.listening(self.waker.fd):
            self.tether = Tether(self.folder.log("guard", self.plan.index))
            try:
                self._start()
                while not self.ended:
                    self._turn()
            finally:
                self.tether.leave_nothing({process.pid for process in self.folder.processes.values()}, spare)
                self.plan.token_file.unlink(missing_ok=True)
                self.display.close()
            return self._finish()

    # start

    def _screen(self) -> Screen:
        return self.display

    def _start(self) -> None:
        self.tether.remove_at_end(self.plan.token_file)
        self.selector.register(self.tether, selectors.EVENT_READ, self._hear_guard)
        self.selector.register(self.waker, selectors.EVENT_READ, self.waker.drain)
        self._put("supervisor", self.plan.index, os.getpid())
        self._put("guard", self.plan.index, self.tether.process.pid)
        self._start_roles()

    def _start_roles(self) -> None:
        """The coordinator and, once all hosts are there, this host's workers."""
        token = self.folder.write_token(self.token)
        self.display.say(*self.crew.invitation)
        self._start_coordinator()
        if not self.crew.several:
            self._start_workers()
        self._start_link(token)
        record = self.folder.read()
        self.link.emit(
            RunStarted(name=self.plan.name, script=self.plan.job.script, strategy=str(record["set_by_user"].get("form", "allreduce")),
                       num_workers=self.plan.num_workers, num_threads=self.plan.num_threads,
                       num_servers=self.plan.num_servers)
        )  # fmt: skip
        if self.crew.several:
            self.crew.gather(self.link, self.waker.wake)

    def _start_link(self, token: str) -> None:
        place = env.Place(
            run=self.plan.name, run_dir=self.folder.path, role="supervisor", rank=self.plan.index,
            world_size=self.plan.num_workers, coordinator=self.plan.coordinator, host=self.plan.host,
        )  # fmt: skip
        self.link = Link(place, token, self.waker.wake)
        self.link.start()
        self.seeing = Seeing(self._pids, lambda: self.link.member)
        self.seeing.start()

    def _start_coordinator(self, incarnation: int = 0) -> None:
        assert self.listening is not None
        self._spawn(self.plan.coordinator_role(incarnation, guard.PASSED_FD), self.listening.fileno())

    def _start_workers(self) -> None:
        self.workers_since = time.monotonic()
        for who in self.plan.mine:
            self._spawn(self.plan.role(who))

    def _formed(self, seats: tuple[Seat, ...], mine: Seat) -> None:
        """All hosts are there: this one starts its part."""
        self.plan = self.plan.seated(mine)
        self.streams.expect(self.plan.num_local)
        self.folder.update(hosts=[seat.to_dict() for seat in seats], num_threads=self.plan.num_threads)
        self.display.note = ""
        self.display.say(*fold(crew.seats_line(seats)), *fold(f"here: {self.plan.threads_sentence}"))
        self._start_workers()

    def _spawn(self, spec: RoleSpec, *extra: int) -> None:
        self.incarnations[spec.id] = spec.incarnation
        writers = self.streams.open(spec.role, spec.rank)
        self.tether.spawn(spec, [*writers, *extra])
        for writer in writers:
            os.close(writer)

    # watch

    def _turn(self) -> None:
        for key, _ in self.selector.select(TICK_S):
            if callable(key.data):
                key.data()
            elif self.selector.get_map().get(key.fd) is key:  # an exit in this very turn may have closed it
                self.streams.read(*key.data)
        for event in self.link.heard():
            self._on_event(event)
        self._look_for_hosts()
        self.streams.tick()
        self.display.tick()
        self._decide(time.monotonic())

    def _look_for_hosts(self) -> None:
        found = self.crew.result()
        if isinstance(found, Assembly) and self.ending_since is None:
            self._formed(found.seats, found.mine)
        elif isinstance(found, Stop):
            self.stop = self.stop or found
        elif self.workers_since is None:
            self.display.note = self.crew.waiting()

    def _on_event(self, event: Event) -> None:
        self.ends.hear(event)
        if isinstance(event, Failed):
            self._first_failure()
        elif self.crew.several:
            self._on_host_event(event)
        self.preempting.hear(event)
        self.display.say(*self.patience.hear(event, time.monotonic()))
        self.display.handle(event)
        for sink in self.sinks:
            sink(event)

    def _on_host_event(self, event: Event) -> None:
        """What the other hosts tell."""
        stop = self.crew.take(event, self.display, self.streams, self.folder, self.plan)
        if self.ending_since is None:
            self.stop = self.stop or stop
        if isinstance(event, ProcessEnded) and (who := Who(event.role, event.rank or 0)) in self.crew.ends:
            self._note_end(who, self._end_of(*who, event.code, event.time, event.peak_rss_bytes))

    def _hear_guard(self) -> None:
        for message in self.tether.hear():
            if "started" in message:
                self._on_start(message["started"], message["pid"])
            elif "exited" in message:
                self._on_exit(message)
            elif "asked" in message:
                self.asked.note(message["asked"])
            elif "cold" in message:
                self.display.say(*fold(f"workers start one by one, not by fork: {message['cold']}"))
            elif "ended" in message:
                self.ended = True
        if self.tether.gone and not self.ended:
            self.ended = True
            if self.ending_since is None:
                words = "the run's guard process was killed, so everything was ended"
                self.stop = self.stop or Stop(137, words)

    def _on_start(self, id: str, pid: int) -> None:
        role, _, rank = id.rpartition("-")
        who, incarnation = Who(role, int(rank)), self.incarnations[id]
        self._put(*who, pid, incarnation)
        if role in (WORKER, SERVER):
            self.cgroups[who] = cause.cgroup_of(pid)
            started = ProcessStarted(
                rank=who.rank, role=role, host=self.plan.host, pid=pid, incarnation=incarnation
            )
            self.link.emit(started)

    def _on_exit(self, message: dict[str, Any]) -> None:
        role, _, text = message["exited"].rpartition("-")
        rank, code = int(text), blame.code_of_status(message["status"])
        process = self.folder.processes[role, rank]
        process.code, process.ended = code, time.time()
        self.folder.put(process)
        self.streams.over(role, rank)
        if role == "coordinator":
            self._on_coordinator_exit(code)
            return
        who, end = Who(role, rank), self._end_of(role, rank, code, time.time(), message["peak_rss_bytes"])
        self.link.emit(ProcessEnded(rank=rank, role=role, host=self.plan.host, pid=message["pid"], code=code,
                                    peak_rss_bytes=end.peak_rss_bytes, **self._last_words(who, end)))  # fmt: skip
        if not self._note_end(who, end):
            self.link.died(who, 0 if self.preempting.in_order(end) else code, process.incarnation)

    def _end_of(self, role: str, rank: int, code: int, when: float, peak: int) -> Exit:
        ours = self.ending_since is not None
        return Exit(rank, code, when, ours, peak, early=role == SERVER and not ours)

    def _note_end(self, who: Who, end: Exit) -> bool:
        """A worker or server is over, here or elsewhere: the beginning of the end, unless it is started again. True if nobody has met it."""
        self.ends.put(who, end)
        if end.ours or not end.failed or self.preempting.in_order(end) or self.failing_since is not None:
            return False
        if self.ends.training and self.ends.without(who, self.plan.num_workers, self.display.say):
            return False
        before, world = self.folder.processes[who].incarnation, (self.plan.num_workers, self.plan.num_servers)
        follows = self.ends.follows(who, end, before, world, self.preempting.begun)
        if isinstance(follows, restart.GiveUp):
            self._first_failure()
            return False
        anew = follows.incarnation == before
        self.display.say(*restart.words(who, self.crew.on_host(who), end.code, self.ends.step, anew))
        if self.plan.is_here(who):
            self._spawn(self.plan.role(who, follows.incarnation))
        return anew

    def _last_words(self, who: Who, end: Exit) -> dict[str, Any]:
        """What the end of a worker is told with; here, where its log lies, nothing more is needed."""
        return {}

    def _on_coordinator_exit(self, code: int) -> None:
        if self.ending_since is not None:
            return
        self.coordinator_ends.append(time.monotonic())
        follows = restart.coordinator(self.coordinator_ends, self.incarnations["coordinator-0"])
        if isinstance(follows, restart.GiveUp):
            words = tuple(tail(self.folder.log("coordinator", 0)))
            code = 1 if self.display.progress.beats else 69
            self.stop = self.stop or Stop(code, follows.reason, words)
            return
        self.display.say(f"the coordinator ended (exit code {code}) and is started again; training goes on")
        self._start_coordinator(follows.incarnation)

    # settle

    def _first_failure(self) -> None:
        if self.failing_since is None and self.ending_since is None:
            self.failing_since = time.monotonic()
            self.streams.failing()

    def _decide(self, now: float) -> None:
        """Is it time to end everything? Asks for it once."""
        if self.asked.times and self.stop is None and self.ending_since is None:
            self._asked()
        if self.display.broken and self.stop is None and self.ending_since is None:
            self.stop = Stop(141, "nobody reads the output any more")
        if self.stop is None and self.ending_since is None and self.failing_since is None:
            self.stop = self.patience.stop(now)
        if self.ending_since is not None:
            if self.asked.times > 1 and not self.hurried:
                self.hurried = True
                self.tether.end(0.0)
            if self.tree_ending_since is None:
                if self.hurried or self._rest_gone() or now - self.ending_since > crew.WAIT_S:
                    self._end_tree()
                return
            self.ended = self.ended or now - self.tree_ending_since > END_S
            return
        if self.stop is not None:
            self._end()
        else:
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Ends the run when it is over or has failed, as far as this host decides that."""
        if self.failing_since is not None:
            if now - self.failing_since >= self.ends.settle_s(self.plan.num_workers):
                self._end()
        elif stop := self.preempting.verdict(self.ends.workers, self.plan.num_workers, now):
            self.stop = stop
        elif len(self.ends.workers) == self.plan.num_workers:
            self.done_since = self.done_since or now
            all_left = len(self.display.progress.left) == self.plan.num_workers
            if all_left or now - self.done_since > blame.LAST_WORDS_S:
                self._end()
        elif self.workers_since is not None and now - self.workers_since > JOIN_TIMEOUT_S:
            self._check_formed()

    def _asked(self) -> None:
        """A first SIGTERM stops in good order; Ctrl-C, a lost terminal and anything after that end the run now."""
        polite = self.asked.number == signal.SIGTERM and self.asked.times == 1
        if not polite or self.workers_since is None:
            self.stop = self.asked.stop()
        elif not self.preempting.begun and self.failing_since is None:
            reason = f"SIGTERM to the supervisor on {self.plan.host}" if self.plan.index else "SIGTERM"
            self.link.ask_stop(reason)
            self.preempting.begin(reason)

    def _stopping(self, words: str) -> None:
        if self.ending_since is None:
            self.display.say(*fold(words))

    def _check_formed(self) -> None:
        here = self.display.progress.heard | self.ends.everybody
        missing = [who for who in self.plan.everybody if who not in here]
        if missing:
            names = ", ".join(f"{who}{self.crew.on_host(who)}" for who in missing)
            words = tuple(tail(self.folder.log(*missing[0])))
            self.stop = Stop(
                69, f"the world did not form: no word from {names} in {JOIN_TIMEOUT_S:g} s", words
            )

    # end

    def _end(self) -> None:
        self.ending_since = self.ending_since or time.monotonic()
        self.seeing.close()
        if self.plan.num_servers and self.code() in IN_ORDER:  # otherwise workers would see them go
            self.link.dismiss()
        self.link.emit(RunEnded(code=self.code(), reason=self.stop.reason if self.stop is not None else ""))
        if self.stop is not None and self.workers_since is None:
            self.link.cancel(self.stop.reason, self.stop.code)
        if self._rest_gone():
            self._end_tree()  # otherwise the others must hear of it first: _decide waits for them

    def _rest_gone(self) -> bool:
        """Have the other hosts, and the servers of a run that ended in good order, left by themselves?"""
        return self.crew.all_gone() and self.ends.servers_left(self.code(), range(self.plan.num_servers))

    def _end_tree(self) -> None:
        self.tree_ending_since = time.monotonic()
        self.link.close(Deadline.after(0.5))
        for event in self.link.heard():
            self._on_event(event)
        self.tether.end(GRACE_S)

    def _finish(self) -> int:
        return finish.finish(self)

    def verdict(self) -> Verdict | None:
        return self.ends.verdict()

    def code(self) -> int:
        if self.stop is not None:
            return self.stop.code
        verdict = self.verdict()
        return verdict.code if verdict is not None else 0

    def _pids(self) -> dict[str, int]:
        """Of the workers and servers that run here, for Seeing."""
        processes = dict(self.folder.processes)
        return {
            who.key: p.pid
            for who in self.plan.mine
            if (p := processes.get(who)) is not None and p.code is None
        }

    def _put(self, role: str, rank: int, pid: int, incarnation: int = 0) -> None:
        self.folder.put(Process(role, rank, self.plan.host, pid, time.time(), start_ticks(pid), incarnation))
