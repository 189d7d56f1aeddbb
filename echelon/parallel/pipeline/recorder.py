"""The recorder: sees every call of a running forward and writes it down as a node.

Three things show it the calls: a TorchFunctionMode (functions and methods of tensors), hooks on modules (whole modules of torch.nn), and
surround.py (what torch shows to nobody). Below them a TorchDispatchMode tells which calls draw random numbers and how much they compute.
The forward runs on fake tensors: shapes without numbers.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from echelon.errors import UsageError
from echelon.parallel.pipeline.record import (
    Autocast,
    Leaf,
    Meta,
    Named,
    Node,
    SetBuffer,
    Setting,
    Value,
    parts_of,
    swap,
    tensors_of,
)

ENTERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
           nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # fmt: skip
"""Modules of torch.nn that are gone into; every other one of torch.nn is one node."""

NUMBERS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"}
"""Calls whose result is no tensor but a tensor's numbers."""

ANCHORED = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
"""Calls that give no tensor and must not be left out: they belong to the stage of their tensor."""

TREES = (Path(torch.__file__).parent.as_posix() + "/", Path(__file__).parents[2].as_posix() + "/")


def is_leaf(module: nn.Module) -> bool:
    """Is a call of it one node? Modules of torch.nn are, containers are not; modules of scripts and libraries never."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, ENTERED)


class Recorder(TorchFunctionMode):
    """One recording. `ambient` is the state of autocast outside of the model; `names` of parameters and buffers by the id of their fakes."""

    def __init__(
        self, names: dict[int, str], storages: dict[int, str], ambient: Autocast, grad: bool
    ) -> None:
        super().__init__()
        self.names, self.ambient, self.grad = names, ambient, grad
        self.named_storages = storages
        """Memory that is there anyway: of parameters and buffers with their name, of inputs without."""
        self.nodes: list[Node] = []
        self.values: list[Meta] = []
        self.refs: dict[int, int] = {}
        """id of a tensor -> its value."""
        self.sharing: dict[int, list[Tensor]] = {}
        """All tensors of a storage. They also keep each other alive, so ids stay theirs."""
        self.stack: list[str] = [""]
        self.quiet = 0
        self.calls: list[tuple[Any, Any, dict[int, int]]] = []
        self.regions: list[int] = []
        self.num_regions = 0
        self.saved: dict[int, Tensor] = {}
        """What autograd keeps, alive, so that its memory stays its own."""
        self.begin()

    def begin(self) -> None:
        """What is counted from here on is of the next node."""
        self.random, self.flops, self.kept = False, 0, 0

    # values

    def new(self, tensor: Tensor, maker: int) -> int:
        """The number of a tensor that was made, or written into, just now."""
        storage = _storage(tensor)
        if id(tensor) not in self.refs:
            self.sharing.setdefault(storage, []).append(tensor)
        self.refs[id(tensor)] = len(self.values)
        device = (
            tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        )  # .device is an operation
        self.values.append(
            Meta(
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                device,
                tensor.requires_grad,
                storage,
                maker,
            )
        )
        return len(self.values) - 1

    def ref(self, tensor: Tensor) -> Any:
        """What stands for a tensor in a record. A real tensor is a constant: an attribute of a module, say."""
        if id(tensor) in self.names:
            return Named(self.names[id(tensor)])
        if id(tensor) in self.refs:
            return Value(self.refs[id(tensor)])
        if isinstance(tensor, FakeTensor):
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} came into the forward of `{self.stack[-1] or 'the model'}` in a way that cannot be "
                f"recorded ({self.line()}), so the model cannot be cut into stages",
                remedy="Make it with a torch function inside forward, keep it as a buffer, or pass it as an input of the model.",
            )
        return tensor

    # calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise self.refuse(f"calls {func.__name__}() inside forward")
        self.quiet += 1
        try:
            return self.run(func, func, args, kwargs)
        finally:
            self.quiet -= 1

    def run(self, call: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Does the call and writes it down if it made or changed a tensor."""
        before = _versions((args, kwargs))
        self.begin()
        name = getattr(func, "__name__", "")
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refuse(f"needs numbers that are only known when it runs ({name or error})") from None
        except UnsupportedOperatorException as error:
            raise UsageError(
                f"{self.line()}: {error} has no fake implementation, so the forward of the model cannot be recorded",
                remedy="Give it one with torch.library.register_fake.",
            ) from None
        except RuntimeError:
            if name in NUMBERS:
                raise self.refuse(f"needs numbers that are only known when it runs ({name})") from None
            raise
        anchored = name in ANCHORED
        if anchored or tensors_of(result) or _changed(before, (args, kwargs)):
            self.write(call, args, kwargs, before, result, self.stack[-1], (), anchored)
        return result

    def write(self, call: Any, args: Any, kwargs: Any, before: dict[int, int], result: Any, module: str,
              names: tuple[str, ...], anchored: bool = False) -> None:  # fmt: skip
        index = len(self.nodes)
        found = list(names)
        seen = swap(self.ref, (tuple(args), dict(kwargs)), Tensor)
        found += [ref.name for ref in parts_of(seen, Named)]
        changed = _changed(before, (args, kwargs))
        renames, writes = [], []
        for storage in dict.fromkeys(_storage(tensor) for tensor in changed):
            for tensor in self.sharing.get(storage, ()):
                old = self.refs[id(tensor)]
                renames.append((old, self.new(tensor, index)))
            if name := self.named_storages.get(storage):
                writes.append(name)
                found.append(name)
        written = {new for _, new in renames}
        outs: list[int | None] = []
        for tensor in tensors_of(result):
            # what was there before and comes back as it is (x.contiguous()) gets a number too: whether it does may differ among ranks
            known = id(tensor) in self.names or self.refs.get(id(tensor)) in written
            outs.append(None if known or not isinstance(tensor, FakeTensor) else self.new(tensor, index))
        if not outs and not renames and not writes and not anchored:
            return
        self.nodes.append(
            Node(module, call, seen[0], seen[1], tuple(outs), tuple(renames), tuple(dict.fromkeys(found)),
                 tuple(writes), self.setting(), self.random, anchored, self.flops, self.kept, self.line())
        )  # fmt: skip

    def setting(self) -> Setting:
        cast = autocast_now()
        return Setting(
            torch.is_grad_enabled() or not self.grad,
            None if cast == self.ambient else cast,
            self.regions[-1] if self.regions else -1,
        )

    def set_buffer(self, path: str, tensor: Tensor, module: str) -> None:
        """At the end of the forward a buffer is another tensor than it was."""
        ref = self.ref(tensor)
        if not isinstance(ref, Value):
            return
        name = f"{module}.{path}" if module else path
        if name not in self.names.values():
            return
        self.nodes.append(
            Node(module, SetBuffer(name), (ref,), {}, (), (), (name,), (name,), Setting(), False, True, 0, 0, "")
        )  # fmt: skip

    # modules

    def enter(self, path: str, leaf: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append(path)
            if leaf:
                self.quiet += 1
                if self.quiet == 1:
                    self.begin()
                state = [*module.parameters(), *module.buffers()] if self.quiet == 1 else []
                self.calls.append((args, kwargs, _versions((args, kwargs, state))))

        return hook

    def leave(self, path: str, leaf: bool, names: tuple[str, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if leaf:
                given, keywords, before = self.calls.pop()
                if self.quiet == 1:
                    state = {id(t): t for t in (*module.parameters(), *module.buffers())}
                    writes = [
                        self.names[i]
                        for i, t in state.items()
                        if i in self.names and before.get(i) != t._version
                    ]
                    self.write(Leaf(path), given, keywords, before, result, path, names)
                    if writes and self.nodes and self.nodes[-1].call == Leaf(path):
                        self.nodes[-1] = dataclasses.replace(self.nodes[-1], writes=tuple(writes))
                self.quiet -= 1
            self.stack.pop()

        return hook

    # what surround.py shows

    def applied(
        self, function: type[torch.autograd.Function], original: Callable[..., Any], args: Any
    ) -> Any:
        if self.quiet:
            return original(*args)
        self.quiet += 1
        try:
            return self.run(_Apply(function), original, args, {})
        finally:
            self.quiet -= 1

    def enter_region(self) -> None:
        self.regions.append(self.num_regions)
        self.num_regions += 1

    def leave_region(self) -> None:
        self.regions.pop()

    def pack(self, tensor: Tensor) -> None:
        """Autograd keeps a tensor for backward: memory that stays, unless it is there anyway."""
        self.quiet += 1
        try:
            storage = _storage(tensor)
            if storage not in self.saved and storage not in self.named_storages and not self.regions:
                self.saved[storage] = tensor
                self.kept += tensor.untyped_storage().nbytes()
        finally:
            self.quiet -= 1

    # words

    def line(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(TREES) and not name.startswith("<"):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return "torch's own code"

    def refuse(self, what: str) -> UsageError:
        module = f"`{self.stack[-1]}`" if self.stack[-1] else "the model"
        return UsageError(
            f"the forward of {module} {what}, so it cannot be cut into stages\n"
            f"  at {self.line()}\n"
            "  A pipeline decides from shapes alone what each stage computes, before there are numbers.",
            remedy="Compute it in the loader and pass it as a plain number, write it with torch.where or a mask instead of `if` and x[mask], or "
            "use --strategy sharded, which runs the forward as it is.",
        )


class _Apply:
    """function.apply, as it is when the node runs: while recording it is another one."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


class Operations(TorchDispatchMode):
    """What a call really does."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch when the class is made; yes would put a wrapper around every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.recorder.random = True
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                self.recorder.flops += int(count(*args, **kwargs, out_val=out))
            except (TypeError, AssertionError, AttributeError):
                pass
        return out


def autocast_now() -> Autocast:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _versions(tree: Any) -> dict[int, int]:
    return {id(tensor): tensor._version for tensor in tensors_of(tree)}


def _changed(before: dict[int, int], tree: Any) -> list[Tensor]:
    """Tensors that were written into."""
    found = {id(t): t for t in tensors_of(tree) if before.get(id(t), t._version) != t._version}
    return list(found.values())
