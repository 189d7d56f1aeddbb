"""What steps moved and the most memory that this worker had, beside what was expected of both.

Counters of groups and links are read where a step begins and where it is applied, so what is sent between steps (evaluation, saves, first
weights) is not in it. The first step, in which models are cut and values come to servers, counts only where it is the only one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from echelon import expected
from echelon.loop import Stepping
from echelon.mesh import allocator
from echelon.mesh.limits import Peak
from echelon.parallel import needs
from echelon.parallel.pipeline.schedule import Orders

if TYPE_CHECKING:
    from echelon.prepared import Prepared


class Tally:
    """One a run; asked from the beat's thread."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.machine, self.world = prepared, prepared.machine, prepared.world
        self.expected_bytes: float | None = None
        self.expected_peak: int | None = None
        self.activations: int | None = None
        """Of the expected peak: what a forward keeps, and its backward takes beside."""
        self._first = self._later = self._later_expected = 0.0
        self._now_expected: float | None = None
        self._orders: list[Orders] = []
        """Of pipelines, in the step for which that was: micro-batches are dealt by speed."""
        self._steps = 0
        self._again = False
        """The step that is under way was lost before: what it took to come back would count as its own."""
        self._seen = self.machine.counters.global_step
        self._mark = self._moved()
        self._peak = Peak()
        self.machine.at_snapshot.append(self._step_begins)
        self.machine.after_apply.append(self._applied)
        self.machine.on_lost.append(self._lost)

    @property
    def step_bytes(self) -> float | None:
        """Moved in a step, on average; None before the first one was applied."""
        if self._steps == 0:
            return None
        return self._first if self._steps == 1 else self._later / (self._steps - 1)

    def peak_bytes(self) -> int | None:
        """The most that this process had at once, where models lie; None where it cannot be read."""
        device = self.world.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return self._peak.look() if device.type == "cpu" else None

    def told(self) -> dict[str, Any]:
        """For the beat."""
        return {
            "step_bytes": self.step_bytes,
            "step_bytes_expected": self.expected_bytes,
            "peak_bytes": self.peak_bytes() if self._steps else None,
            "peak_bytes_expected": self.expected_peak,
            "activation_bytes": self.activations,
        }

    def _moved(self) -> float:
        servers = self.world.servers
        return self.world.groups.sent_bytes + (servers.moved_bytes if servers is not None else 0)

    def _step_begins(self) -> None:
        self._again = False
        if self.prepared.rounds is None:  # copies meet between steps, and that is what they do
            self._mark = self._moved()
        self._expect(self._steps == 0)
        if self._steps == 0:
            allocator.release()  # models were made, moved, split: training takes other memory
        if self._steps:
            self.prepared.graphs.end()

    def _applied(self, optimizer: Stepping) -> None:
        before, self._mark = self._mark, self._moved()
        moved, step = self._mark - before, self.machine.counters.global_step
        fresh, self._seen = step != self._seen, step
        if self._again:
            self._again = self.machine.current is not None  # no loader says where the next one begins
            return
        self._steps += fresh
        if self._steps > 1:
            self._later += moved
            self.prepared.graphs.end()
            if any(
                piped.orders is not old
                for piped, old in zip(self.prepared.piped.values(), self._orders, strict=False)
            ):
                self._expect_now()
            if fresh and self._now_expected is not None:
                self._later_expected += self._now_expected
                self.expected_bytes = self._later_expected / (self._steps - 1)
            return
        self._first += moved
        self._expect_now()
        self.expected_bytes = self._now_expected
        self._heed_room()

    def _expect_now(self) -> None:
        """What the step that was just made is expected to have moved, and the most memory up to it."""
        self._orders = [piped.orders for piped in self.prepared.piped.values()]
        self._now_expected = expected.step_bytes(self.prepared)
        peak, activations = expected.peak_bytes(self.prepared)
        if peak is not None and peak > (self.expected_peak or 0):
            self.expected_peak, self.activations = peak, activations

    def _heed_room(self) -> None:
        """What did not look short before the first batch may be so with it."""
        found, activations = self.prepared.needs, self.activations
        if found is not None and activations and self.world.device.type == "cpu":
            have = needs.room(self.world.device, self.prepared.run_name)
            needs.give_back_if_short(
                found[0], self.prepared.strategy, self.world.size, have, found[1], activations
            )

    def _lost(self) -> None:
        self._again = True

    def _expect(self, so: bool) -> None:
        """Layers that workers share add up what the first step's shapes make them send: from its beginning."""
        for shared in self.prepared.shared.values():
            if shared.axis is not None and (so or shared.axis.expects):
                shared.axis.expect(so)
