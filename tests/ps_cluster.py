"""A parameter server's cluster as a deterministic simulation: messages with random delays, workers that die in mid-push and
come again, joiners, messages told twice. What happens follows from the seed alone; the policies are the real ones.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from echelon.data.deal import part as dealt
from echelon.ps.dealt import Dealt
from echelon.ps.decisions import Accept, Apply, Decision, Drop, Grant, Halt, Part, Rollback, Wait
from echelon.ps.ordered import Ordered
from echelon.ps.staleness import Staleness
from echelon.ps.versions import Arrivals, Completion, Kept, agreed


class Torn(AssertionError):
    """Something that must never happen in a cluster."""


@dataclass
class Storm:
    """What goes wrong, and how fast each worker is."""

    seed: int
    kills: int = 0
    joins: int = 0
    comes_again: float = 0.7
    """Chance that a killed worker is started again; otherwise it is gone for good."""
    twice: float = 0.1
    """Chance that a message is delivered a second time."""
    slow: dict[int, float] = field(default_factory=dict)


class Time:
    """A fake clock and what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._number), call))

    def run(self, done: Callable[[], bool], limit: int = 200_000) -> None:
        for _ in range(limit):
            if done():
                return
            if not self._due:
                raise Torn("nothing is due and the work is not done: somebody starves")
            self.now, _, call = heapq.heappop(self._due)
            call()
        raise Torn(f"not done after {limit} events")


@dataclass
class Worker:
    """One process. `term` and `step` are what it works on; `versions` what servers granted it for this step."""

    rank: int
    incarnation: int
    alive: bool = True
    term: int = 0
    step: int = 0
    versions: dict[int, int] = field(default_factory=dict)


@dataclass
class Server:
    rank: int
    policy: Ordered | None
    kept: Kept
    completion: Completion
    log: list[Apply] = field(default_factory=list)
    behind: dict[int, Apply] = field(default_factory=dict)
    """Decided by the first server and not carried out here yet."""


class Cluster:
    """What both kinds of policy need: processes, messages, faults."""

    def __init__(self, num_workers: int, num_servers: int, storm: Storm) -> None:
        self.random = random.Random(storm.seed)
        self.storm = storm
        self.time = Time()
        self.workers = {rank: Worker(rank, 0) for rank in range(num_workers)}
        self.num_servers = num_servers
        self.staleness = Staleness()
        self.dropped: Counter[str] = Counter()
        self.new_ranks = itertools.count(num_workers)

    def delay(self) -> float:
        return self.random.expovariate(10.0)

    def computing(self, rank: int) -> float:
        return self.storm.slow.get(rank, 1.0) * self.random.uniform(0.5, 1.5)

    def send(self, call: Callable[[], None]) -> None:
        """A message; sometimes it comes twice."""
        self.time.after(self.delay(), call)
        if self.random.random() < self.storm.twice:
            self.time.after(self.delay() * 5, call)

    def plan_faults(self, span: float) -> None:
        for _ in range(self.storm.kills):
            self.time.after(self.random.uniform(0, span), self._kill)
        for _ in range(self.storm.joins):
            self.time.after(self.random.uniform(0, span), self._join)

    def _kill(self) -> None:
        living = [w for w in self.workers.values() if w.alive]
        if len(living) < 2:
            return
        victim = self.random.choice(living)
        victim.alive = False
        again = self.random.random() < self.storm.comes_again
        self.time.after(0.3 + self.delay(), lambda: self.gone(victim, again))

    def _join(self) -> None:
        self.enter(Worker(next(self.new_ranks), 0))

    def push(self, worker: Worker, part: Part, arrive: Callable[[int, Part], None]) -> None:
        """To one server after the other; who dies in between leaves some of them without."""
        for server in range(self.num_servers):
            self.time.after(server * 0.05, lambda s=server: self._leave(worker, part, arrive, s))

    def _leave(self, worker: Worker, part: Part, arrive: Callable[[int, Part], None], server: int) -> None:
        if worker.alive and worker.term == part.term:
            self.send(lambda: arrive(server, part))

    def gone(self, worker: Worker, again: bool) -> None:
        raise NotImplementedError

    def enter(self, worker: Worker) -> None:
        raise NotImplementedError


class OrderedCluster(Cluster):
    """sync and bounded: every server decides by itself; the coordinator makes terms."""

    def __init__(
        self, num_workers: int, num_servers: int, storm: Storm, *, steps: int, staleness: int, batch: int = 13
    ) -> None:
        super().__init__(num_workers, num_servers, storm)
        self.steps, self.bound, self.batch = steps, staleness, batch
        self.term = 0
        self.members = dict.fromkeys(self.workers, 0)
        self.changing = False
        self.again: list[Callable[[], None]] = []
        self.samples: dict[tuple[int, int, int], range] = {}
        self.servers = [
            Server(s, Ordered(self.members, staleness=staleness), Kept(), Completion(range(num_servers)))
            for s in range(num_servers)
        ]
        self.undone = 0
        """Updates that one server had applied and another had not."""
        for worker in self.workers.values():
            self._ask(worker)

    def run(self) -> None:
        self.plan_faults(self.steps * 1.2)
        self.time.run(self._done)

    def _done(self) -> bool:
        return not self.changing and all(s.completion.committed >= self.steps for s in self.servers)

    # workers

    def _ask(self, worker: Worker) -> None:
        worker.versions = {}
        term, step = worker.term, worker.step
        if step >= self.steps:
            return
        for server in self.servers:
            self.send(lambda s=server: self._asked(s, worker, term, step))

    def _asked(self, server: Server, worker: Worker, term: int, step: int) -> None:
        policy = server.policy
        assert policy is not None
        if (
            term == policy.term
            and worker.alive
            and worker.step == step
            and server.rank not in worker.versions
        ):
            self._carry_out(server, policy.asked(worker.rank, step))

    def _granted(self, server: int, grant: Grant, term: int) -> None:
        worker = self.workers[grant.worker]
        if not worker.alive or (worker.term, worker.step) != (term, grant.step) or server in worker.versions:
            return
        worker.versions[server] = grant.version
        if len(worker.versions) == self.num_servers:
            step, version = worker.step, min(worker.versions.values())
            self.time.after(self.computing(worker.rank), lambda: self._computed(worker, term, step, version))

    def _computed(self, worker: Worker, term: int, step: int, version: int) -> None:
        if not worker.alive or worker.term != term:
            return
        order = sorted(self.members)
        lo, hi = dealt(self.batch, order.index(worker.rank), len(order))
        self.samples[term, step, worker.rank] = range(step * self.batch + lo, step * self.batch + hi)
        part = Part(worker.rank, step, version, hi - lo, worker.incarnation, term)
        self.push(worker, part, lambda s, p: self._arrived(self.servers[s], p))
        worker.step += 1
        self._ask(worker)

    # servers

    def _arrived(self, server: Server, part: Part) -> None:
        assert server.policy is not None
        self._carry_out(server, server.policy.arrived(part))

    def _carry_out(self, server: Server, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert decision.reason
            if isinstance(decision, Apply):
                self._apply(server, decision)
            elif isinstance(decision, Grant):
                term = server.policy.term if server.policy else 0
                self.send(lambda g=decision, t=term: self._granted(server.rank, g, t))
            elif isinstance(decision, Rollback):
                self.undone += len(server.kept.rollback(decision.version))
                del server.log[decision.version :]
            elif isinstance(decision, Drop):
                self.dropped[decision.kind] += 1

    def _apply(self, server: Server, update: Apply) -> None:
        if [part.worker for part in update.parts] != sorted(self.members):
            raise Torn(f"{update} does not hold one part of each member in rank order")
        server.kept.apply(update.step)
        if len(server.kept.versions) > 2:
            raise Torn(f"server {server.rank} keeps {server.kept.versions}")
        server.log.append(update)
        for behind in update.staleness:
            self.staleness.add(behind)
            if behind > self.bound:
                raise Torn(f"{update} is {behind} behind, {self.bound} allowed")
        term = server.policy.term if server.policy else 0
        for other in self.servers:
            report = lambda o=other: self._completed(o, server.rank, update.step + 1, term)  # noqa: E731
            report() if other is server else self.send(report)

    def _completed(self, server: Server, who: int, version: int, term: int) -> None:
        assert server.policy is not None
        before = server.completion.committed
        committed = server.completion.report(who, version, term)
        if committed > before:
            server.kept.commit(committed)
            self._carry_out(server, server.policy.committed(committed))

    # the coordinator

    def gone(self, worker: Worker, again: bool) -> None:
        self._change(lambda: self._without(worker, again))

    def enter(self, worker: Worker) -> None:
        self._change(lambda: self._with(worker))

    def _change(self, change: Callable[[], None]) -> None:
        """One change at a time, as the journal has it."""
        self.again.append(change)
        if not self.changing:
            self._next_change()

    def _next_change(self) -> None:
        self.changing = bool(self.again)
        if self.again:
            self.again.pop(0)()

    def _without(self, worker: Worker, again: bool) -> None:
        members = {r: i for r, i in self.members.items() if r != worker.rank}
        if again or not members:
            members[worker.rank] = worker.incarnation + 1
        self._new_term(members, lambda p: p.lost(worker.rank, "was killed"))

    def _with(self, worker: Worker) -> None:
        members = {**self.members, worker.rank: worker.incarnation}
        self._new_term(members, lambda p: p.joined(worker.rank, worker.incarnation))

    def _new_term(self, members: dict[int, int], tell: Callable[[Ordered], list[Decision]]) -> None:
        applied: dict[int, int] = {}

        def halt(server: Server) -> None:
            assert server.policy is not None
            if server.rank in applied:
                return
            decisions = tell(server.policy)
            assert all(isinstance(d, Halt) for d in decisions)
            assert server.policy.halted
            applied[server.rank] = server.policy.version
            if len(applied) == self.num_servers:
                self._begin_term(members, agreed(applied))

        for server in self.servers:
            self.send(lambda s=server: halt(s))

    def _begin_term(self, members: dict[int, int], version: int) -> None:
        self.term += 1
        term, told = self.term, set()

        def tell(server: Server) -> None:
            assert server.policy is not None
            if server.rank in told:
                return
            told.add(server.rank)
            self._carry_out(server, server.policy.regroup(term, members, version))
            server.completion.rollback(version, term)
            server.kept.commit(version)
            if len(told) == self.num_servers:
                self._start(members, version)

        for server in self.servers:
            self.send(lambda s=server: tell(s))

    def _start(self, members: dict[int, int], version: int) -> None:
        self.members = members
        for rank, incarnation in members.items():
            known = self.workers.get(rank)
            if known is None or known.incarnation != incarnation:
                self.workers[rank] = Worker(rank, incarnation)
            worker = self.workers[rank]
            worker.term, worker.step = self.term, version
            self._ask(worker)
        self._next_change()

    # what must hold in the end

    def check(self) -> None:
        for server in self.servers:
            assert [update.step for update in server.log] == list(range(self.steps)), "in order, none twice"
            assert server.log == self.servers[0].log, "the same update for all ranges"
            used = [i for u in server.log for p in u.parts for i in self.samples[p.term, p.step, p.worker]]
            assert used == list(range(self.steps * self.batch)), "every sample once, in global order"
            assert all(u.divisor == self.batch for u in server.log)


class DealtCluster(Cluster):
    """backup, async and local: the first server decides, the others carry it out in order."""

    def __init__(self, policy: Dealt, num_servers: int, storm: Storm, epochs: list[range]) -> None:
        super().__init__(len(policy.members), num_servers, storm)
        self.policy = policy
        self.epochs = epochs
        self.arrivals = Arrivals(range(num_servers))
        self.servers = [Server(s, None, Kept(), Completion(range(num_servers))) for s in range(num_servers)]
        self.completion = Completion(range(num_servers))
        self.order: dict[int, list[Part]] = {}
        """By version that they were computed on: accepted and late parts as they became whole."""
        self.late: list[Part] = []
        self.grants: Counter[int] = Counter()
        self._carry_out(policy.open(epochs.pop(0)))
        for worker in self.workers.values():
            self._ask(worker)

    def run(self) -> None:
        pieces = self.policy.ledger.left + sum(len(e) for e in self.epochs)
        self.plan_faults(1.2 * pieces / max(1, len(self.workers)))
        self.time.run(self._done)

    def _done(self) -> bool:
        if self.policy.ledger.complete and self.epochs:
            self._carry_out(self.policy.open(self.epochs.pop(0)))
        everywhere = all(len(s.log) == self.policy.version for s in self.servers)
        return self.policy.ledger.complete and not self.epochs and everywhere

    def _ask(self, worker: Worker) -> None:
        """For the next step, at once: the question may overtake the part before it."""
        step = worker.step
        self.time.after(self.delay(), lambda: self._asked(worker, step))

    def _asked(self, worker: Worker, step: int) -> None:
        if worker.alive and self.policy.members.get(worker.rank) == worker.incarnation:
            self._carry_out(self.policy.asked(worker.rank, step))

    def _computed(self, worker: Worker, grant: Grant) -> None:
        if worker.alive:
            part = Part(
                worker.rank, grant.step, grant.version, len(grant.pieces), worker.incarnation, 0, grant.pieces
            )
            worker.step += 1
            self.push(worker, part, self._reached)
            self._ask(worker)

    def _reached(self, server: int, part: Part) -> None:
        """The server has it and tells the first one."""
        self.send(lambda: self._whole(part) if self.arrivals.report(server, part) else None)

    def _whole(self, part: Part) -> None:
        decisions = self.policy.arrived(part)
        first = decisions[0]
        if isinstance(first, Accept) or (isinstance(first, Drop) and first.kind == "stale"):
            self.order.setdefault(part.version, []).append(part)
        self._carry_out(decisions)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert decision.reason
            if isinstance(decision, Apply):
                for behind in decision.staleness:
                    self.staleness.add(behind)
                for server in self.servers:
                    self.send(lambda s=server, u=decision: self._apply(s, u))
            elif isinstance(decision, Grant):
                self.grants[decision.worker] += 1
                worker = self.workers[decision.worker]
                self.time.after(
                    self.delay() + self.computing(worker.rank),
                    lambda w=worker, g=decision: self._computed(w, g),
                )
            elif isinstance(decision, Drop):
                self.dropped[decision.kind] += 1
                if decision.kind == "stale":
                    self.late.append(decision.part)
            else:
                assert isinstance(decision, (Accept, Wait))

    def _apply(self, server: Server, update: Apply) -> None:
        """In the order of updates, whatever the order of messages."""
        if update.step < server.kept.newest:
            return
        server.behind[update.step] = update
        while server.kept.newest in server.behind:
            update = server.behind.pop(server.kept.newest)
            server.kept.apply(update.step)
            server.log.append(update)
            self.send(lambda v=update.step + 1: self._completed(server.rank, v))

    def _completed(self, server: int, version: int) -> None:
        before = self.completion.committed
        committed = self.completion.report(server, version)
        if committed > before:
            for each in self.servers:
                each.kept.commit(committed)
            self._carry_out(self.policy.committed(committed))

    def gone(self, worker: Worker, again: bool) -> None:
        self.arrivals.forget(worker.rank, worker.incarnation + 1)
        if again:
            self.enter(replace(worker, incarnation=worker.incarnation + 1, alive=True))
        else:
            self._carry_out(self.policy.lost(worker.rank))

    def enter(self, worker: Worker) -> None:
        self.workers[worker.rank] = worker
        self._carry_out(self.policy.joined(worker.rank, worker.incarnation))
        self._ask(worker)

    def check(self, pieces: list[int]) -> None:
        for server in self.servers:
            assert server.log == self.servers[0].log
        log = self.servers[0].log
        assert [u.step for u in log] == list(range(len(log)))
        used = Counter(piece for update in log for part in update.parts for piece in part.pieces)
        assert used == Counter(pieces), "every piece in exactly one update"
        for update in log:
            assert [p.worker for p in update.parts] == sorted(p.worker for p in update.parts)
            assert update.divisor == sum(p.count for p in update.parts)
