"""What a plan is made of: modules as it sees them, ways to split a layer, and blocks of layers that belong together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A module of the model."""

    path: str
    kind: str
    """linear, embedding, convolution, norm (BatchNorm), attention (torch's), layer (torch's transformer layers), sequential,
    elementwise, channelwise, other."""
    type: str = ""
    rows: int = 0
    """Of a weight: output features, entries of a table. 0 where there is none that can be split."""
    columns: int = 0
    numbers: tuple[tuple[str, int], ...] = ()
    """Whole numbers that the module holds under a name: heads and the like."""
    weight: int = 0
    """The same number for modules that share a weight; 0 for none."""
    refused: str = ""
    """Why a module of this kind cannot be split."""

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Way:
    """How one layer is split."""

    path: str
    kind: str
    """column (output features), gather (the same, and the output is gathered at once, not when it is read), row (input features),
    vocab (entries), heads (torch's attention), channels out, in and of a norm."""
    units: int
    """Things along the split dimension that stay together."""
    packed: int = 1
    inside: bool = False
    """In a block: a column layer's output stays split, a row layer's input is split already."""


@dataclass(frozen=True)
class Option:
    """One way to split a block: its layers, and the numbers of its module that become a worker's own."""

    ways: tuple[Way, ...]
    numbers: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    """Parameters that stay whole and are used for a part of the features on each worker (a norm of each head): their gradients are
    added up. Found out when the option is tried."""


@dataclass(frozen=True)
class Block:
    """What belongs together. The first option that proves right is taken; else `alone`, which is right by itself."""

    path: str
    options: tuple[Option, ...]
    reason: str
    alone: tuple[Way, ...] = ()
    span: tuple[str, ...] = ()
    """Of a Sequential: the children from the first layer to the last; the block is these."""
    known: bool = False
    """The type is torch's own: its first option needs no proof."""

    @property
    def layers(self) -> set[str]:
        return {way.path for option in self.options for way in option.ways} | {way.path for way in self.alone}
