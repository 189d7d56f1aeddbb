"""Goes through a worker's list of actions: receives what an action takes, runs it, sends what it gives.

Receives are posted some actions ahead, so that values come while the worker computes. Sends are never waited for while
somebody may need something of this worker first: only when a later message of the receiver shows that it has what was sent, and at
the end of the list. So a Group whose sends block until they are received cannot deadlock here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.clock import Clock, Deadline
from echelon.comm.group import Group, Lost, Receipt, Work
from echelon.parallel.pipeline.contract import Action, Before, Kind, Port, Stage
from echelon.parallel.pipeline.framed import Label, opened, pack
from echelon.parallel.pipeline.pool import Pool
from echelon.parallel.pipeline.schedule import Orders, owners

AHEAD = 1
"""Receives are posted for so many actions after the present one: more hides more, and takes memory for what is not needed yet."""


@dataclass
class Ran:
    """A list that came to its end, and what it took."""

    seconds: list[tuple[Action, float]] = field(default_factory=list)
    """Of each action, in order, without what it waited for."""

    waited_s: float = 0.0
    """For values of other workers, and at the end until they have taken all that was sent."""

    total_s: float = 0.0

    @property
    def bubble(self) -> float:
        """The share of its own time that this worker waited. What it waits after its list is not in it: bubble.measured counts that."""
        return self.waited_s / self.total_s if self.total_s else 0.0

    @property
    def computed_s(self) -> float:
        return sum(s for _, s in self.seconds)

    def spent(self, kind: Kind) -> float:
        return sum(s for action, s in self.seconds if action.kind == kind)

    @property
    def per_micro(self) -> float | None:
        """Seconds of computing that a micro-batch took here; None if there was none."""
        micros = {action.micro for action, _ in self.seconds}
        return self.computed_s / len(micros) if micros else None


class Runtime:
    """One worker's end of a pipe. `group`: the workers of the pipe, numbered as the lists are. Not for several threads."""

    def __init__(
        self, group: Group, device: torch.device | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.group, self.device, self.clock = group, device or torch.device("cpu"), clock
        self.pool = Pool(pinned=self.device.type == "cuda")

    def run(
        self,
        orders: Orders,
        stages: Mapping[int, Stage],
        step: int,
        deadline: Deadline,
        before: Before | None = None,
    ) -> Ran | Lost:
        """One step: this worker's list from its beginning to its end. All ranks come with the same lists and the same `step`.

        A lost peer is a value: the stages have then dropped everything, and the group is of no more use. So they have, and so it
        is for all others as well, when a stage raises or a message is not the one that is due; this goes on upwards."""
        walk = _Walk(self, orders, stages, step, deadline)
        try:
            outcome = walk.through(before)
        except BaseException as error:
            self._unwind(
                stages,
                f"rank {self.group.rank} of the pipe failed in {walk.at}: {type(error).__name__}: {error}",
            )
            raise
        if isinstance(outcome, Lost):
            self._unwind(stages, outcome.reason)
        else:
            self.pool.trim()
        return outcome

    def _unwind(self, stages: Mapping[int, Stage], reason: str) -> None:
        """The others may wait for something of this worker, which never comes now. The group may still write to our buffers."""
        self.group.abort(reason)
        self.pool.forget()
        for stage in stages.values():
            stage.drop()


@dataclass(frozen=True)
class _Way:
    """A value that an action takes or gives, who is at the other end, and what that does with it."""

    label: Label
    peer: int
    action: Action


@dataclass
class _Sent:
    work: Work
    buffer: Tensor
    taken_by: int
    """The place in the receiver's list of the action that takes it."""


class _Walk:
    """One step of one worker."""

    def __init__(
        self, runtime: Runtime, orders: Orders, stages: Mapping[int, Stage], step: int, deadline: Deadline
    ) -> None:
        self.group, self.pool, self.device, self.clock = (
            runtime.group,
            runtime.pool,
            runtime.device,
            runtime.clock,
        )
        self.orders, self.stages, self.step, self.deadline = orders, stages, step, deadline
        self.order, self.owner = orders[self.group.rank], owners(orders)
        self.places: dict[int, dict[Action, int]] = {}
        self.ports: dict[tuple[int, int], tuple[list[Port], list[Port]]] = {}
        self.ways: dict[Action, tuple[list[_Way], list[_Way]]] = {}
        self.num_posted = 0
        self.posted: dict[Label, tuple[Receipt, Tensor]] = {}
        self.here: dict[Label, Tensor] = {}
        """Values between two stages of this worker."""
        self.sent: dict[int, deque[_Sent]] = {}
        self.ran = Ran()
        self.at = "the beginning of its list"

    def through(self, before: Before | None) -> Ran | Lost:
        began = self.clock()
        for at, action in enumerate(self.order):
            self.at = f"{action.kind} of micro-batch {action.micro} on stage {action.stage}"
            self._post(at)
            taken = self._take(action)
            if isinstance(taken, Lost):
                return taken
            if before:
                before(action)
            self._give(action, self._do(action, taken))
        self.at = "the end of its list"
        lost = self._settle()
        self.ran.total_s = self.clock() - began
        return lost or self.ran

    def _do(self, action: Action, taken: Mapping[Port, Tensor]) -> Mapping[Port, Tensor]:
        """Runs it; what it gives, by port."""
        stage, micro, began = self.stages[action.stage], action.micro, self.clock()
        given: Mapping[Port, Tensor] = {}
        if action.kind == "forward":
            made = stage.forward(micro, {port.value: x for port, x in taken.items()})
            given = {port: made[port.value] for port in self._ports(action)[1]}
        elif action.kind == "backward":
            given = stage.backward(micro, taken)
        else:
            stage.weights(micro)
        self.ran.seconds.append((action, self.clock() - began))
        return given

    def _post(self, at: int) -> None:
        """Asks for what the next actions take, in order."""
        for action in self.order[self.num_posted : at + 1 + AHEAD]:
            for way in self._takes(action):
                if way.peer != self.group.rank:
                    buffer = self.pool.take(way.label.num_bytes)
                    self.posted[way.label] = self.group.recv(buffer, way.peer, way.label.tag), buffer
            self.num_posted += 1

    def _take(self, action: Action) -> dict[Port, Tensor] | Lost:
        taken: dict[Port, Tensor] = {}
        for way in self._takes(action):
            if way.peer == self.group.rank:
                taken[way.label.port] = self.here.pop(way.label)
                continue
            work, buffer = self.posted.pop(way.label)
            lost = self._wait(work)
            if lost:
                return Lost(
                    lost.peers, f"{lost.reason} (rank {self.group.rank} of the pipe waited for {way.label})"
                )
            taken[way.label.port] = opened(buffer, way.label, way.peer, self.group.rank).to(self.device)
            lost = self._forget_sent(way.peer, self._place(way.peer, way.action))
            if lost:
                return lost
        return taken

    def _give(self, action: Action, given: Mapping[Port, Tensor]) -> None:
        for way in self._gives(action):
            port = way.label.port
            x = given.get(port)
            if x is None:  # no gradient: nothing of what was given depends on it
                x = torch.zeros(port.shape, dtype=port.dtype)
            buffer = self.pool.take(way.label.num_bytes)
            pack(buffer, way.label, x)
            if way.peer == self.group.rank:  # as if it had travelled: both stages may write on their own
                self.here[way.label] = opened(buffer, way.label, way.peer, way.peer).to(self.device)
                continue
            sent = _Sent(
                self.group.send(buffer, way.peer, way.label.tag), buffer, self._place(way.peer, way.action)
            )
            self.sent.setdefault(way.peer, deque()).append(sent)

    def _forget_sent(self, peer: int, reached: int) -> Lost | None:
        """The peer has come to this place of its list: what it took up to there, it has. These waits end at once."""
        waiting = self.sent.get(peer, deque())
        for sent in [s for s in waiting if s.taken_by <= reached]:
            lost = self._wait(sent.work)
            if lost:
                return lost
            waiting.remove(sent)
        return None

    def _settle(self) -> Lost | None:
        """Nothing is left to do here: now sends may take as long as they take."""
        for sent in (s for waiting in self.sent.values() for s in waiting):
            lost = self._wait(sent.work)
            if lost:
                return lost
        return None

    def _wait(self, work: Work) -> Lost | None:
        began = self.clock()
        outcome = work.wait(self.deadline)
        self.ran.waited_s += self.clock() - began
        return outcome if isinstance(outcome, Lost) else None

    def _takes(self, action: Action) -> Sequence[_Way]:
        return self._ways(action)[0]

    def _gives(self, action: Action) -> Sequence[_Way]:
        return self._ways(action)[1]

    def _ways(self, action: Action) -> tuple[list[_Way], list[_Way]]:
        """What an action takes and gives: values forward, gradients of the same values back."""
        found = self.ways.get(action)
        if found is None:
            takes, gives = self._ports(action)
            forth, micro = action.kind == "forward", action.micro
            if not forth:
                takes, gives = [p for p in gives if p.grad], [p for p in takes if p.grad]
            if action.kind == "weights":
                takes, gives = [], []
            found = self.ways[action] = (
                [self._way(p, micro, not forth, p.source if forth else p.target) for p in takes],
                [self._way(p, micro, not forth, p.target if forth else p.source) for p in gives],
            )
        return found

    def _ports(self, action: Action) -> tuple[list[Port], list[Port]]:
        """What a stage takes and gives of a micro-batch, in the order that both ends of a tag go by."""
        at = action.stage, action.micro
        if at not in self.ports:
            stage = self.stages[action.stage]
            found = stage.takes(action.micro), stage.gives(action.micro)
            takes, gives = (sorted(ports, key=lambda p: (p.value, p.target)) for ports in found)
            self.ports[at] = takes, gives
        return self.ports[at]

    def _way(self, port: Port, micro: int, back: bool, other: int) -> _Way:
        peer = self.owner[other, micro]
        return _Way(
            Label(self.step, micro, port, back), peer, Action("backward" if back else "forward", other, micro)
        )

    def _place(self, peer: int, action: Action) -> int:
        places = self.places.get(peer)
        if places is None:
            places = self.places[peer] = {a: i for i, a in enumerate(self.orders[peer])}
        return places[action]
