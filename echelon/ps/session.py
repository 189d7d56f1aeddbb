"""Training, as a server offers it: sums for workers that apply them, or the whole optimizer step.

train.sum      every worker's addends of a flat piece; all get the sum                       apply=worker
train.open     the ranges that a server holds of a model; worker 0 brings their values       apply=server
train.push     gradients of some ranges: provisional, answered once they were used or taken back
train.back     takes a push back
train.squares  what every worker's pushes sum up to: squares and whether it is finite
train.apply    every worker's optimizer steps: all who have room for them get the new values
train.step     a worker's part of an update and its step in one, where workers are not at one place (steps.py)
train.pull     the values as they are, or some bytes of them
train.values   a worker changed values itself
train.state    the optimizer's state of some ranges
train.load     … and back
train.enter    a worker is in this term: told once all are. What was pushed and not used is void
train.settle   all workers know what every server has: an update that some servers lack did not happen, nor did a lost iteration's
train.void     an iteration of which an update was made is lost on every worker: it did not happen
train.lead     this server leads a shard from now on: the one that did is gone

Calls name the shard that they are about. A call that comes a second time, because the server that had answered or should have answered it
is gone, is answered and not done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from echelon import activity
from echelon.control.roster import partner
from echelon.errors import EchelonError, PeerLost, UsageError
from echelon.ps import looking, undoing
from echelon.ps.adding import add_up, rooms
from echelon.ps.copies import Copies, Copy, loaded, since_of
from echelon.ps.judge import Reporter
from echelon.ps.mirror import Mirror, Site
from echelon.ps.recipes import Recipe
from echelon.ps.service import Peer, Request
from echelon.ps.staleness import Staleness
from echelon.ps.steps import check_same, named
from echelon.ps.together import Together, carry_out, check_alike, refuse_all, sense, some
from echelon.verdict import to_plain

NAME = "train"


class Training:
    """A service of a host (service.Service). One a server; workers come over connections of their own. `site` is how it reaches other
    servers, for copies of what it holds."""

    def __init__(self, num_workers: int, copies: Copies | None = None, site: Site | None = None) -> None:
        self.num_workers, self.site = num_workers, site
        self.copies = copies or Copies(0, num_workers, 1)
        self.mirrors: dict[int, Mirror] = {}
        self.together = Together(num_workers)
        self.reporter = Reporter(site, self.copies.num_servers) if site is not None else None
        self._gone: set[tuple[int, int]] = set()
        """Workers whose connection is over, with their incarnation."""
        self.term = self.updates = self.sums = 0
        self._entered: dict[int, tuple[int, int]] = {}
        """Worker -> the term it is in, and its incarnation. Before the first change all are in term 0."""
        self._lock = threading.Lock()
        self._mirroring = threading.Lock()
        """Held while a shard gets its mirror: whoever finds the shard led here finds its mirror too."""
        self._early: dict[tuple[int, int], list[tuple[Request, list[tuple[Any, ...]]]]] = {}
        """Opened by workers before worker 0 brought the values."""
        self._verbs: dict[str, Callable[[Request], None]] = {
            name: getattr(self, f"_{name}")
            for name in (
                "sum", "open", "push", "back", "squares", "apply", "step", "values", "pull", "state", "load",
                "enter", "settle", "void", "lead",
            )
        }  # fmt: skip

    def called(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        if verb is None or request.peer.role != "worker":
            raise UsageError(f"{request.peer} called {request.verb}, which servers do not offer it")
        if not 0 <= request.peer.rank < self.num_workers:
            raise UsageError(f"there is no worker {request.peer.rank} of {self.num_workers}")
        activity.moved()
        outside = request.verb in ("enter", "lead", "pull")  # what was committed stays so in the next term
        if not outside and self._entered.get(request.peer.rank, (0, 0))[0] < self.term:
            raise PeerLost(f"{request.peer} called {request.verb} in a term that is over")
        with sense(request):
            verb(request)

    def gone(self, peer: Peer) -> None:
        if peer.role == "worker":
            self._gone.add((peer.rank, peer.incarnation))
        if peer.role == "worker" and peer.incarnation >= self._entered.get(peer.rank, (0, 0))[1]:
            self.together.lose(peer.rank, "ended its connection to a parameter server")
            with self._lock:
                early, self._early = self._early, {}
            for request, _ in (one for waiting in early.values() for one in waiting):
                request.refuse(self.together.lost or PeerLost(f"{peer} is gone", peers=(peer.rank,)))

    def close(self) -> None:
        for mirror in self.mirrors.values():
            mirror.close()
        if self.reporter is not None:
            self.reporter.close()

    def stale(self) -> Staleness:
        """By how many updates the parts of all models were behind."""
        found = Staleness()
        for copy in list(self.copies.held.values()):
            found.merge(copy.updates.staleness.histogram(), copy.updates.staleness.max)
        return found

    def skipped(self) -> int:
        """Updates that moved nothing, of all models: each server passes over the same ones."""
        of: dict[int, int] = {}
        for (shard, _), copy in list(self.copies.held.items()):
            of[shard] = of.get(shard, 0) + copy.updates.skipped
        return max(of.values(), default=0)

    # -- terms, and who leads --------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        term, shard = int(request.head["term"]), self.copies.shard_of(request)
        with self._lock:
            if term < self.term:
                raise PeerLost(f"term {term} is over: this is term {self.term}")
            if term > self.term:
                self._begin(term)
            self._entered[request.peer.rank] = (term, request.peer.incarnation)
        all_of_them = self.together.add(("enter", term, shard), request)
        for one in all_of_them or ():
            one.answer(undoing.standing(self.copies.of_shard(shard)))

    def _begin(self, term: int) -> None:
        void = f"term {term} of the run has begun: what was under way is void"
        self.term = term
        self.together.renew(void)
        early, self._early = self._early, {}
        refuse_all([request for waiting in early.values() for request, _ in waiting], PeerLost(void))
        for (shard, model), copy in list(self.copies.held.items()):
            if shard in self.copies.leading:
                with copy.lock:
                    copy.shard.forget_pushes(PeerLost(void))
                    copy.done.clear()
                    self._mirrored(shard, "begin", model)

    def _settle(self, request: Request) -> None:
        all_of_them = self.together.add(("settle", self.term, self.copies.shard_of(request)), request)
        if all_of_them is not None:
            carry_out(all_of_them, lambda: self._go_back(all_of_them))

    def _go_back(self, requests: list[Request]) -> None:
        shard, targets = self.copies.shard_of(requests[0]), requests[0].head["updates"]
        for model, updates in targets.items():
            copy = self.copies.held[shard, int(model)]
            with copy.lock:
                if undoing.needed(copy, int(updates), f"shard {shard} of model {model}"):
                    self._undo(shard, int(model), copy)
        for one in requests:
            one.answer()

    def _void(self, request: Request) -> None:
        """Whoever comes first undoes it. None can be late: the iteration's next update needs every worker, after this."""
        copy, since = self.copies.of(request), int(request.head["since"])
        with copy.lock:
            if copy.shard.open is not None and copy.shard.open[0] == since:
                self._undo(self.copies.shard_of(request), int(request.head["model"]), copy)
        request.answer()

    def _undo(self, shard: int, model: int, copy: Copy) -> None:
        copy.shard.undo()
        self._mirrored(shard, "undo", model, {"updates": copy.shard.updates})

    def _lead(self, request: Request) -> None:
        shard = int(request.head["shard"])
        with self._mirroring:
            if self.copies.take_over(shard, int(request.head["epoch"])):
                self._mirror(shard, there=False)
        request.answer()

    def _mirror(self, shard: int, there: bool) -> Mirror | None:
        """How changes of this shard reach the other server that holds it."""
        if self.site is None or self.copies.num_servers < 2:
            return None
        other = partner(shard, self.copies.rank, self.copies.num_servers)
        self.mirrors[shard] = Mirror(self.copies, shard, other, self.site, there=there)
        return self.mirrors[shard]

    def _mirrored(
        self, shard: int, verb: str, model: int, head: dict[str, Any] | None = None, *tensors: Tensor
    ) -> None:
        mirror = self.mirrors.get(shard)
        if mirror is not None:
            mirror.tell(verb, model, head or {}, tensors)

    # -- apply=worker ----------------------------------------------------------------------------------------------

    def _sum(self, request: Request) -> None:
        head = request.head
        among = some(head, self.num_workers)
        key = ("sum", head["model"], head["number"], head.get("part", 0), *([among] if among else []))
        all_of_them = self.together.add(key, request, among)
        if all_of_them is not None:
            self.sums += 1
            carry_out(all_of_them, lambda: add_up(all_of_them))

    # -- apply=server ----------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> None:
        at = self.copies.shard_of(request), int(request.head["model"])
        spec = [tuple(r) for r in request.head["ranges"]]
        if at[0] not in self.copies.leading:
            raise PeerLost(f"server {self.copies.rank} does not serve shard {at[0]}")
        with self._lock:
            if self.together.lost is not None and at not in self.copies.held:
                raise self.together.lost
            waiting = [(request, spec)]
            if request.peer.rank == 0 and at not in self.copies.held:
                waiting = [*self._early.pop(at, []), *waiting]
                carry_out([one for one, _ in waiting], partial(self._make, at, spec, request))
                if at not in self.copies.held:
                    return
            elif at not in self.copies.held:
                self._early.setdefault(at, []).append((request, spec))
                return
            shard = self.copies.held[at].shard
        for one, mine in waiting:
            if mine != shard.spec:
                one.refuse(
                    UsageError(f"worker {one.peer.rank} has other parameters in model {at[1]} than worker 0")
                )
            else:
                one.answer({"updates": shard.updates, "held": self.term > 0})

    def _make(self, at: tuple[int, int], spec: list[tuple[Any, ...]], request: Request) -> None:
        self.copies.held[at] = copy = self.copies.make(spec, request.tensors[0])
        if not request.head.get("replicas"):
            return
        try:
            with self._mirroring:
                mirror = self.mirrors.get(at[0]) or self._mirror(at[0], there=True)
            if mirror is not None:
                mirror.begin(at[1], copy)
        except BaseException:
            del self.copies.held[at]
            raise

    def _push(self, request: Request) -> None:
        copy, head = self.copies.of(request), request.head
        with copy.lock:
            copy.shard.push(request.peer.rank, head["push"], head["keys"], request, head.get("used", ()))

    def _back(self, request: Request) -> None:
        copy = self.copies.of(request)
        with copy.lock:
            for number in request.head["pushes"]:
                copy.shard.take_back(request.peer.rank, number)
        request.answer()

    def _squares(self, request: Request) -> None:
        copy, keys = self.copies.of(request), request.head["keys"]
        if self._was_done(copy, request):
            request.answer({"squares": [0.0] * len(keys), "finite": True})  # it was heard before
            return
        all_of_them = self._all(request, "squares")
        if all_of_them is not None:
            with copy.lock:
                carry_out(all_of_them, lambda: self._tell_squares(copy, all_of_them))

    def _tell_squares(self, copy: Copy, requests: list[Request]) -> None:
        found, finite = copy.shard.squares(requests[0].head["keys"])
        whose = {} if finite else {"whose": to_plain(copy.shard.broken(requests[0].head["keys"]))}
        for one in requests:
            one.answer({"squares": found, "finite": finite, **whose})

    def _apply(self, request: Request) -> None:
        copy = self.copies.of(request)
        if self._was_done(copy, request):
            with copy.lock:
                groups, unused = request.head["groups"], request.head["unused"]
                keys = [*(key for _, _, of in groups for key in of), *unused]
                copy.shard.used(keys, request.peer.rank)
                request.answer({"updates": copy.shard.updates}, copy.values_for(request))
            return
        all_of_them = self._all(request, "apply")
        if all_of_them is not None:
            with copy.lock:
                carry_out(all_of_them, lambda: self._apply_all(copy, all_of_them))

    def _was_done(self, copy: Copy, request: Request) -> bool:
        return int(request.head["number"]) <= copy.done.get(request.peer.rank, -1)

    def _apply_all(self, copy: Copy, requests: list[Request]) -> None:
        head, shard = requests[0].head, copy.shard
        groups = [(Recipe.from_plain(recipe), float(factor), keys) for recipe, factor, keys in head["groups"]]
        shard.check(key for _, _, keys in groups for key in keys)
        into = rooms(requests, shard.memory.nbytes)
        self._update(copy, requests, 1, int(head["optimizer"]), groups, shard.parts, into, since_of(head))
        shard.used([*(key for _, _, keys in groups for key in keys), *head["unused"]])
        for at, one in enumerate(requests):
            one.answer({"updates": shard.updates}, [into[at]] if into else copy.values_for(one))

    def _update(self, copy: Copy, requests: list[Request], following: int, *update: Any) -> None:
        """Here and on the partner: what Shard.step is given."""
        done = {one.peer.rank: int(one.head["number"]) for one in requests}
        mirror = self.mirrors.get(self.copies.shard_of(requests[0]))
        if mirror is None:
            copy.shard.step(*update)
            copy.done.update(done)
        else:
            mirror.update(int(requests[0].head["model"]), copy, done, following, *update)
        self.updates += 1

    def _step(self, request: Request) -> None:
        copy, head = self.copies.of(request), request.head
        updates, number = copy.updates, int(head["number"])
        if head["alone"] and self._refused(copy, [request]):
            return
        with copy.lock:
            if self._was_done(copy, request):
                request.answer({"updates": copy.shard.updates, "stop": updates.stop}, [copy.shard.memory])
                return
            if head["alone"]:
                step = partial(self._update, copy, [request], updates.next)
                carry_out([request], lambda: updates.alone(request, step))
                return
        key = ("step", self.copies.shard_of(request), head["model"], number)
        all_of_them = self.together.add(key, request)
        if all_of_them is None:
            return
        try:
            check_same(all_of_them)
            if self._refused(copy, all_of_them):
                return
        except EchelonError as error:
            refuse_all(all_of_them, error)
            return
        with copy.lock:
            for due in updates.complete(number, all_of_them):
                step = partial(self._update, copy, due, int(due[0].head["number"]) + 1)
                carry_out(due, partial(updates.carry_out, due, step))

    def _refused(self, copy: Copy, parts: list[Request]) -> bool:
        """What is decided about an update over all servers, where somebody asks; True if it was refused, and all were told. Without any
        lock: servers may wait for each other."""
        head, first, count = parts[0].head, parts[0].peer, self.copies.num_servers
        clip_norm, rule = float(head["clip_norm"]), looking.rule_of(parts[0])
        if not looking.needed(clip_norm, rule, count):
            return False

        def lost() -> PeerLost | None:
            if not head["alone"]:
                return self.together.lost
            return PeerLost(f"{first} is gone") if (first.rank, first.incarnation) in self._gone else None

        about = (self.copies.shard_of(parts[0]), int(head["model"]), named(parts))
        whole = looking.over_all(self.reporter, count, *about, looking.summary(copy.shard, parts), lost)
        copy.updates.decided[named(parts)], refused = looking.decided(whole, rule, clip_norm)
        if refused is not None:
            looking.refuse(parts, copy.updates.decided.pop(named(parts)))
        return refused is not None

    def _all(self, request: Request, what: str) -> list[Request] | None:
        """All workers' requests, if they ask for the same."""
        head, shard = request.head, self.copies.shard_of(request)
        all_of_them = self.together.add((what, shard, head["model"], head["number"]), request)
        try:
            check_alike(all_of_them or ())
        except UsageError as error:
            refuse_all(all_of_them or (), error)
            return None
        return all_of_them

    def _values(self, request: Request) -> None:
        copy = self.copies.of(request)
        with copy.lock:
            copy.shard.overwrite(request.tensors[0], str(request.peer))
            self._mirrored(
                self.copies.shard_of(request), "values", int(request.head["model"]), {}, copy.shard.memory
            )
        request.answer()

    def _pull(self, request: Request) -> None:
        copy = self.copies.of(request)
        with copy.lock:
            copy.updates.sent(request.peer.rank)
            memory, spans = copy.shard.memory, request.head.get("spans")
            wanted = [memory] if spans is None else [memory[begin:end] for begin, end in spans]
            request.answer({"updates": copy.shard.updates}, wanted)

    def _state(self, request: Request) -> None:
        copy = self.copies.of(request)
        with copy.lock:
            told, tensors = copy.shard.state(int(request.head["optimizer"]), request.head["keys"])
            request.answer({"state": told}, tensors)

    def _load(self, request: Request) -> None:
        copy, head = self.copies.of(request), request.head
        with copy.lock:
            copy.shard.load(*loaded(request))
            told = {key: head[key] for key in ("optimizer", "recipes", "state")}
            self._mirrored(self.copies.shard_of(request), "load", int(head["model"]), told, *request.tensors)
        request.answer()
