"""What a forward keeps for its backward: read off the graph behind a loss when its backward begins, in the first step.

Nothing is hooked into the graph and nothing is unpacked: what a script's own hooks made of a saved tensor is counted as they left it, and
what was packed into something that is no tensor (checkpoints that compute again, files) makes the graph one that is not counted."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from echelon.data import tree
from echelon.mesh.unwinding import Operation, most
from echelon.parallel.local import is_split

PASSING = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Alias", "Clone", "Detach", "Permute", "ReshapeAlias", "Squeeze", "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
)  # fmt: skip
"""Operations whose backward gives on the gradient as it came."""


class Unknown(Exception):
    """Something is kept whose size cannot be seen."""


@dataclass(frozen=True)
class Graph:
    """Bytes of what one backward will go through."""

    kept: int
    """By the forward, without parameters and buffers."""

    most: int
    """At once in the backward: that, and gradients on their way."""


def graph(
    roots: Iterable[Tensor], device: torch.device, own: Iterable[Tensor] = (), held: Iterable[Tensor] = ()
) -> Graph | None:
    """Counted on `device`, with what else the script holds meanwhile, and without what shares memory with `own` or with leaves that are
    trained. None where it cannot be told."""
    try:
        return _Reading(device, own).read([root for root in roots if root.grad_fn is not None], held)
    except Exception:  # a graph that cannot be read is no reason to end a run
        return None


class _Reading:
    def __init__(self, device: torch.device, own: Iterable[Tensor]) -> None:
        self.device = device
        self.own = {_place(t) for t in own}
        self.names: dict[type, tuple[list[str], bool]] = {}
        self.views: dict[Hashable, dict[Hashable, int]] = {}
        """Kept bytes: by memory, of each stretch of it."""
        self.whole: dict[Hashable, int] = {}

    def read(self, roots: Sequence[Tensor], held: Iterable[Tensor]) -> Graph:
        nodes, index = _nodes(root.grad_fn for root in roots)
        self.own |= {_place(n.variable) for n in nodes if type(n).__name__ == "AccumulateGrad"}
        operations = [
            Operation(
                order=node._sequence_nr(),
                gives=tuple(
                    (index[id(to)], at, _coming(to, at)) for to, at in node.next_functions if to is not None
                ),
                keeps=tuple(self._keep(node)),
                passes=type(node).__name__ in PASSING,
            )
            for node in nodes
        ]
        for tensor in (*roots, *held):
            list(self._tensor(tensor))
        sizes = {place: min(self.whole[place], sum(some.values())) for place, some in self.views.items()}
        begins = [(index[id(root.grad_fn)], root.output_nr, root.nbytes) for root in roots]
        return Graph(sum(sizes.values()), most(operations, sizes, begins))

    def _keep(self, node: Any) -> Iterator[Hashable]:
        """Blocks that a node keeps: what it saved, and, for a function of the script's own, what it put aside by itself."""
        kind = type(node)
        if kind not in self.names:
            saved = [name for name in dir(node) if name.startswith("_raw_saved_")]
            self.names[kind] = saved, hasattr(node, "__dict__")
        saved, has_own = self.names[kind]
        for name in saved:
            found = getattr(node, name)
            for each in found if isinstance(found, (tuple, list)) else (found,):
                if each is not None:
                    yield from self._packed(each)
        for value in vars(node).values() if has_own else ():
            for tensor in _tensors(value):
                yield from self._tensor(tensor)

    def _packed(self, saved: Any) -> Iterator[Hashable]:
        packed = saved.data
        if packed is None:
            return
        found = list(_tensors(packed))
        if not found:
            raise Unknown(type(packed).__name__)
        for tensor in found:
            yield from self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> Iterator[Hashable]:
        tensor = _here(tensor)
        place, storage = _place(tensor), tensor.untyped_storage()
        if place in self.own or tensor.device.type != self.device.type or not storage.nbytes():
            return
        self.whole[place] = storage.nbytes()
        # of a batch that is a slice of the data only the slice counts; of parts of one result each
        self.views.setdefault(place, {})[tensor.storage_offset(), tuple(tensor.shape)] = tensor.nbytes
        yield place


def _nodes(begin: Iterable[Any]) -> tuple[list[Any], dict[int, int]]:
    """All that can be reached, and the place of each by its id."""
    nodes: list[Any] = []
    index: dict[int, int] = {}
    todo = list(begin)
    while todo:
        node = todo.pop()
        if id(node) not in index:
            index[id(node)] = len(nodes)
            nodes.append(node)
            todo += [to for to, _ in node.next_functions if to is not None]
    return nodes, index


def _coming(node: Any, output: int) -> int:
    """Bytes of the gradient that comes to an output of a node."""
    about = node._input_metadata[output]
    return int(prod(about.shape) * about.dtype.itemsize)


def _place(tensor: Tensor) -> Hashable:
    """The memory that it lies in."""
    return int(_here(tensor).untyped_storage()._cdata)


def _here(tensor: Tensor) -> Tensor:
    """The part of it that is here, without an operation that a mode of the script's would see."""
    return tensor._local_tensor if is_split(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


class Backwards:
    """Looks at the graphs of the first step: from `begin`, when a model is prepared, to `end`, when a step was made. Nothing is left then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.looks = False
        self.label: Hashable = None
        """What the backwards that come now belong to."""
        self.found: dict[Hashable, Graph | None] = {}
        """Of each label the largest; None where one could not be read."""
        self.left: dict[Hashable, int] = {}
        """Bytes that stay after a backward, for gradients of weights that were put off."""
        self._own: list[Callable[[], Iterable[Tensor]]] = []
        self._outputs: list[weakref.ref[Tensor]] = []
        self._inside: list[Graph | None] = []

    def begin(self) -> None:
        self.looks = True
        watch.add(self)

    def end(self) -> None:
        """After every step: it costs one look once it looks no more."""
        if not self.looks:
            return
        self.looks = False
        self._outputs.clear()
        watch.remove(self)

    def leave_out(self, own: Callable[[], Iterable[Tensor]]) -> None:
        """What shares memory with these is counted elsewhere."""
        self._own.append(own)

    def gave(self, output: Any) -> None:
        """A model's forward gave this: it counts for as long as the script holds it."""
        if self.looks:
            with contextlib.suppress(
                Exception
            ):  # of an object that does not let itself be gone through nothing counts
                self._outputs += map(weakref.ref, tree.tensors(output))

    @contextlib.contextmanager
    def around(self, roots: list[Tensor]) -> Iterator[None]:
        """Around a backward that begins at these."""
        self._look(roots)
        try:
            yield
        finally:
            self._inside.pop()

    def _look(self, roots: list[Tensor]) -> None:
        """A backward in the middle of another (a checkpoint that computes again) comes on top of that."""
        held = [t for t in (ref() for ref in self._outputs) if t is not None]
        found = graph(roots, self.device, (t for own in self._own for t in own()), held)
        if self._inside and found is not None:
            outer = self._inside[-1]
            found = Graph(outer.kept, max(outer.most, outer.kept + found.most)) if outer is not None else None
        self._inside.append(found)
        before = self.found.get(self.label, Graph(0, 0))
        known = found is not None and before is not None
        self.found[self.label] = max(found, before, key=lambda graph: graph.most) if known else None  # type: ignore[union-attr, type-var]


class Watch:
    """torch.autograd.backward, replaced while somebody looks. A run that its script has dropped looks no more."""

    def __init__(self) -> None:
        self.looking: weakref.WeakSet[Backwards] = weakref.WeakSet()
        self._inner: Any = None

    def add(self, one: Backwards) -> None:
        self.looking.add(one)
        if self._inner is None:
            self._inner, torch.autograd.backward = torch.autograd.backward, self._backward  # type: ignore[assignment]

    def remove(self, one: Backwards) -> None:
        self.looking.discard(one)
        if not self.looking and self._inner is not None and torch.autograd.backward == self._backward:
            # else somebody wrapped ours, which does nothing any more
            torch.autograd.backward, self._inner = self._inner, None

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as looks:
            for one in list(self.looking):
                looks.enter_context(one.around(list(_tensors(tensors))))
            self._inner(tensors, *args, **kwargs)


watch = Watch()
