"""Where a rank's share of the state lies in its file: planned once for state that looks alike, used for every checkpoint of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.checkpoint import kinds, tensorfile
from echelon.checkpoint.holding import Holding, Part, share


@dataclass
class Slot:
    """Where a part lies in the buffer, and so in the file. Its holding, number `number` of those given, is without its tensor."""

    part: Part
    entry: str
    offset: int
    number: int
    crc32: list[int] = field(default_factory=list)


class Plan:
    """Raises CheckpointError for what no checkpoint can hold. Keeps no tensor: each checkpoint brings its own."""

    def __init__(self, holdings: Sequence[Holding], rank: int) -> None:
        for holding in holdings:
            holding.check(rank)
        self._rows = [
            (
                h.key,
                h.span,
                h.copies,
                h.settled,
                h.tensor.dtype,
                h.tensor.shape,
                h.tensor.layout,
                h.tensor.device,
            )
            for h in holdings
        ]
        numbers = {id(holding): number for number, holding in enumerate(holdings)}
        self.slots = _lay_out(share(holdings, rank), numbers)
        self.num_bytes = sum(slot.part.num_bytes for slot in self.slots)

    def fits(self, holdings: Sequence[Holding]) -> bool:
        """Would the plan for these be this one? A microsecond each, and nothing is kept; planning takes ten."""
        return len(holdings) == len(self._rows) and all(
            row == (h.key, h.span, h.copies, h.settled, (t := h.tensor).dtype, t.shape, t.layout, t.device)
            for row, h in zip(self._rows, holdings, strict=True)
        )


def _lay_out(parts: Sequence[Part], numbers: Mapping[int, int]) -> list[Slot]:
    """Widest types first, so that everything lies aligned."""
    taken = {tensorfile.METADATA}
    slots, offset = [], 0
    for part in sorted(parts, key=lambda part: -kinds.width(part.holding.tensor.dtype)):
        key = part.holding.key
        entry = key.name if key.slot == "value" else f"{key.name}#{key.slot}"
        if not part.whole:
            run = part.run
            entry += f"[{run.start}:{run.start + run.length}" + (
                f"+{run.period}*{run.count}]" if run.count > 1 else "]"
            )
        while entry in taken:
            entry += "~"
        taken.add(entry)
        slots.append(Slot(_bare(part), entry, offset, numbers[id(part.holding)]))
        offset += part.num_bytes
    return slots


def _bare(part: Part) -> Part:
    nothing = torch.empty(0, dtype=part.holding.tensor.dtype)
    return dataclasses.replace(part, holding=dataclasses.replace(part.holding, tensor=nothing))
