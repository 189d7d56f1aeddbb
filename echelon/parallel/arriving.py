"""Values on their way (ps, apply=server): parameters that a step has changed on the servers, and whose new values come while the script goes on.

Between step() and the arrival of its values a parameter is an `Arriving`: a parameter that waits for them when somebody computes with it,
reads it, copies it or writes into it, and then is a plain one again. So a layer begins as soon as its own values are there, and every
other reader (state_dict, averages, penalties, tied weights, copies, prints) is right as well, wherever it is. What can be asked
without numbers (shape, grad, …) does not wait.

Some readers do not ask the parameter: compiled code, and tensors that share its memory. Where there are such, a step waits (`why_not`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._functorch import eager_transforms
from torch.autograd.graph import get_gradient_edge, increment_version

from echelon.comm.group import Lost
from echelon.errors import EchelonError, PeerLost, UsageError
from echelon.ps.held import Call, Held
from echelon.ps.spans import Piece, cut
from echelon.ps.worker import lost

WORTH_BYTES = 1 << 20
"""Less than this comes with the answer of the step: a second message would take longer than what it hides."""

LOCAL = False
"""Hide values of servers on this host as well: there is no link to wait for, only memory and cores that the forward needs."""

_FREE = frozenset({
    "grad", "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "numel", "names",
    "is_sparse", "is_cuda", "is_meta", "is_floating_point", "is_complex", "element_size", "itemsize", "nbytes", "_version", "__hash__",
    "retains_grad", "is_quantized", "is_mkldnn", "register_hook", "register_post_accumulate_grad_hook", "_backward_hooks",
})  # fmt: skip
"""What can be asked of a parameter, and done with its gradient, without its numbers."""

_coming: dict[int, Arrivals] = {}
"""By the parameter's id: who knows when its values are here."""


def worth(num_bytes: int, all_local: bool) -> str:
    """Why the values of a model are better waited for inside step(); "" when they are not."""
    if num_bytes < WORTH_BYTES:
        return f"{num_bytes} bytes come as fast with the answer"
    if all_local and not LOCAL:
        return "the servers are on this host"
    return ""


class Arriving(nn.Parameter):
    """A parameter whose values are on their way. Only its class says so: memory, hooks and id are those of before and after."""

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        asked = getattr(func, "__name__", "")
        if asked in ("__get__", "__set__"):
            asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked in _FREE:
            with _quietly():
                return func(*args, **(kwargs or {}))
        if not _land_in((args, kwargs)):
            settle()  # it lies deeper than we look
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        _land(self)
        return nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _land(self)
        return self.__reduce_ex__(protocol)


def settle() -> None:
    """Blocks until every value that is on its way in this process is here."""
    for arrivals in set(_coming.values()):
        arrivals.settle()


def _land(param: Tensor) -> None:
    arrivals = _coming.get(id(param))
    if arrivals is None:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    else:
        arrivals.land(param)


def _land_in(found: Any) -> bool:
    """Every parameter in there; says whether there was one."""
    if type(found) is Arriving:
        _land(found)
        return True
    if isinstance(found, tuple | list):
        return sum(_land_in(x) for x in found) > 0
    if isinstance(found, dict):
        return sum(_land_in(x) for x in found.values()) > 0
    return False


def _quietly() -> AbstractContextManager[None]:
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


class Arrivals:
    """The values of one model, on their way or not. `waited(seconds)` is told how long somebody stood still for some of them.
    Thread-safe."""

    def __init__(self, held: Held, params: dict[str, nn.Parameter], waited: Callable[[float], None]) -> None:
        self.held, self.params, self.waited = held, params, waited
        self.wanted = True
        """False where something reads all values after every step: they come faster with its answer."""
        self.first, self.hidden = True, 0
        """Before the first step; and steps so far whose values came later."""
        self.never: Lost | None = None
        """Values of a step that was committed will never come: parameters here are of no use any more."""
        self.order: list[str] | None = None
        """In which the script needed them; learned from the first values that came while it went on."""
        self._touched: list[str] = []
        self._pieces: list[Piece] = []
        self._names = {id(p): name for name, p in params.items()}
        self._piece_of: dict[str, int] = {}
        self._calls: dict[int, list[Call]] = {}
        """Of pieces that nobody has waited for."""
        self._left: set[str] = set()
        self._nodes: dict[str, Any] = {}
        """Where autograd ends in each parameter. Autograd makes one anew where nobody has it, and each counts as a holder."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.num_bytes = sum(p.numel() * p.element_size() for p in params.values())

    def why_not(self) -> str:
        """Why the next values have to be waited for inside step(); "" when they need not."""
        if self.first or not self.wanted:
            return "the first step" if self.first else "something reads all of them after every step"
        why = worth(self.num_bytes, all(link.local for link in self.held.servers.links))
        if why:
            return why
        if not _watch_transforms():
            return "this torch wraps parameters in a way that is not known here"
        if _compiled():
            return "compiled code reads parameters without asking them"
        for name, param in self.params.items():
            if type(param) is not nn.Parameter or param.device.type != "cpu":
                return f"`{name}` is no plain parameter in this host's memory"
            if self.held.shared(name) or self._known_elsewhere(name, param):
                return f"something else holds the memory of `{name}`"
        return ""

    def _known_elsewhere(self, name: str, param: nn.Parameter) -> bool:
        """Does a compiled module have this tensor? It would read it past Python."""
        if param.requires_grad and name not in self._nodes:
            self._nodes[name] = get_gradient_edge(param).node
        return _holders(param) > 1 + (name in self._nodes)

    def stepped(self, hidden: bool, note: Callable[[], None]) -> None:
        """The servers have stepped; if `hidden`, asks for all values, in the order in which they are needed, and returns at once.
        `note()` is called while autograd's counters are those after the step."""
        self.first = False
        if hidden:
            increment_version(self.params.values())  # a graph of before may not be used any more, as in torch
        note()
        if hidden:
            self.hidden += 1
            self._begin()

    def check(self) -> None:
        """Raises PeerLost if parameters here are not what the last step left."""
        if self.never is not None:
            raise PeerLost(f"values of the last step never came: {self.never.reason}", peers=self.never.peers)

    def _begin(self) -> None:
        with self._lock:
            if not self._pieces:
                self._pieces = cut(self.held.placement, self.order or list(self.params))
                self._piece_of = {name: i for i, piece in enumerate(self._pieces) for name in piece.names}
            self._touched = []
            self._calls = {i: self.held.ask(piece) for i, piece in enumerate(self._pieces)}
            self._left = set(self.params)
            _coming.update(dict.fromkeys(self._names, self))
            for param in self.params.values():
                param.__class__ = Arriving

    def land(self, param: Tensor) -> None:
        """Blocks until the values of this one are here, and in it. Raises nothing: this is somebody's forward."""
        if self._pid != os.getpid():
            raise UsageError(
                "a process that was forked right after a step reads parameters whose values were on their way to its parent",
                remedy="Read one of them (or call run.evaluate, run.save) before you fork.",
            )
        with self._lock:
            name = self._names[id(param)]
            if name in self._left:
                if self.order is None:  # one by one, so that each tells when it is needed
                    self._touched.append(name)
                    self._take(self._piece_of[name], [name])
                else:
                    self._take(self._piece_of[name])

    def settle(self) -> None:
        """Blocks until everything is here."""
        if not self._left:
            return
        with self._lock:
            for i in range(len(self._pieces)):
                self._take(i)

    def _take(self, i: int, names: Sequence[str] | None = None) -> None:
        piece = self._pieces[i]
        names = [name for name in names or piece.names if name in self._left]
        if not names:
            return
        began = time.perf_counter()
        try:
            self.held.arrived(self._calls.get(i, ()), piece)
            self._calls[i] = []
            self.held.put(names)
        except EchelonError as error:
            self.never = self.never or lost(error)
        finally:
            self.waited(time.perf_counter() - began)
        for name in names:  # not after Ctrl-C: they are still on their way
            param = self.params[name]
            param.__class__ = nn.Parameter
            _coming.pop(id(param), None)
        self._left.difference_update(names)
        if not self._left and self.order is None and self._touched:
            touched = set(self._touched)
            self.order = [*self._touched, *(name for name in self.params if name not in touched)]
            self._pieces = []


def _compiled() -> bool:
    """Was torch.compile called in this process?"""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())


def _holders(param: Tensor) -> int:
    """How many hold this tensor, Python included; many if this torch does not tell."""
    count = getattr(param, "_use_count", None)
    return 1 << 30 if count is None else int(count())


def _watch_transforms() -> bool:
    """torch.func.grad wraps tensors without asking them: it does from now on. False where this torch does it in another way."""
    inner = getattr(eager_transforms, "_wrap_tensor_for_grad", None)
    if inner is None or getattr(inner, "_echelon", False):
        return inner is not None

    def wrap(maybe_tensor: Any, level: int) -> Any:
        if type(maybe_tensor) is Arriving:
            _land(maybe_tensor)
        return inner(maybe_tensor, level)

    wrap._echelon = True  # type: ignore[attr-defined]
    eager_transforms._wrap_tensor_for_grad = wrap
    return True
