"""A model's forward, recorded: the script's own Python runs once for each shape of inputs, on tensors that have shapes and no numbers.

Nothing is computed and nothing allocated, so a model whose parameters lie elsewhere (placeholders) is recorded as well. Control flow
over shapes, `self.training` and plain numbers just works: other inputs of that sort make another record. Control flow
over numbers of tensors is refused with the line that asks for them. Recording leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.parallel.pipeline.placing import is_placeholder
from echelon.parallel.pipeline.record import Leaf, Node, Record, SetBuffer, swap, tensors_of
from echelon.parallel.pipeline.recorder import Operations, Recorder, autocast_now, is_leaf
from echelon.parallel.pipeline.surround import surrounded

KEPT = 16
"""Records that a model keeps: lengths of sequences should come in few kinds, as with any compiler."""


class Records:
    """The records of one model, by what makes them differ. Not for several threads."""

    def __init__(self, model: nn.Module, call: Callable[..., Any] | None = None) -> None:
        """`call` runs the model where `model(...)` itself would not: when a script's own calls are refused, say."""
        self.model = model
        self.call = call or model
        self._kept: OrderedDict[Hashable, Record] = OrderedDict()
        self._walked: list[_Walked] = []

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Hashable = None) -> Record:
        """The record of the forward for inputs like these, in the model's present mode (`mode`: what `now` gave, where many are asked for)."""
        key = _shape((args, dict(kwargs))), mode or self.now()
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = record(self.model, args, kwargs, self.call)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found

    def now(self) -> Hashable:
        """What records depend on beside the inputs: asked in every step, so the walk through the model is remembered while it is the same."""
        if not self._walked or any(walked.stale() for walked in self._walked):
            self._walked = [_Walked(module) for module in self.model.modules()]
        modes = tuple(walked.module.training for walked in self._walked)
        frozen = tuple(p is not None and p.requires_grad for walked in self._walked for p in walked.own)
        return modes, frozen, torch.is_grad_enabled(), autocast_now()


class _Walked:
    """A module as it was found: what it held then is kept alive, so that nothing else has its identity."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner, self.own = tuple(module._modules.values()), tuple(module._parameters.values())
        self.ids = tuple(map(id, (*self.inner, *self.own)))

    def stale(self) -> bool:
        return self.ids != tuple(map(id, (*self.module._modules.values(), *self.module._parameters.values())))


def _shape(tree: Any) -> Hashable:
    """Of a tensor what a record depends on; of everything else itself."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype, tree.device, tree.requires_grad, tree.stride())
    if isinstance(tree, Mapping):
        return (type(tree), tuple((key, _shape(value)) for key, value in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree), tuple(_shape(part) for part in tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return (type(tree), tuple(_shape(getattr(tree, f.name)) for f in dataclasses.fields(tree)))
    try:
        hash(tree)
    except TypeError:
        return (type(tree), repr(tree))
    return (type(tree), tree)


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[..., Any] | None = None) -> Record:  # fmt: skip
    """The forward of model(*args, **kwargs).

    1. set up: fakes of parameters, buffers and inputs; hooks on modules
    2. run: the forward, once
    3. read: the output, buffers that were replaced, what can be told only at the end
    """
    call = call or model
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # set up
    fakes = {id(t): _fake(t, mode) for t in (*model.parameters(), *model.buffers())}
    names = {id(fakes[id(t)]): name for name, t in named(model).items()}
    memory = {int(fakes[id(t)].untyped_storage()._cdata): name for name, t in named(model).items()}
    recorder = Recorder(names, memory, autocast_now(), torch.is_grad_enabled())
    made: dict[int, Tensor] = {}

    def give(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = mode.from_tensor(tensor)
            recorder.new(made[id(tensor)], -1)
            recorder.named_storages.setdefault(int(made[id(tensor)].untyped_storage()._cdata), "")
        return made[id(tensor)]

    given = swap(give, (args, dict(kwargs)), Tensor)
    inputs = tuple(recorder.refs[id(made[id(tensor)])] for tensor in tensors_of((args, dict(kwargs))))
    replaced: list[tuple[str, str, Tensor]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_it_was(model))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        _swap_state(model, fakes)
        stack.enter_context(_hooks(model, recorder))
        stack.enter_context(surrounded(recorder))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mode)
        stack.enter_context(Operations(recorder))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, _never))
        # run
        with recorder:
            output = call(*given[0], **given[1])
        # read
        known = set(names)
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in known:
                    replaced.append((path, name, buffer))
        for path, name, buffer in replaced:
            recorder.set_buffer(name, buffer, path)
        tree = swap(recorder.ref, output, Tensor)
    return _finished(model, recorder, inputs, tree)


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the first name of each."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _finished(model: nn.Module, recorder: Recorder, inputs: tuple[int, ...], output: Any) -> Record:
    first = {id(module): path for path, module in model.named_modules()}
    modules = {path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)}
    here = {name: getattr(t, "_local_tensor", t) for name, t in named(model).items()}
    sizes = {name: t.numel() * t.element_size() for name, t in here.items()}
    whole = Record(tuple(recorder.nodes), tuple(recorder.values), inputs, output, (), sizes, modules)
    nodes = _freed(_used(whole))
    place = {number: at for at, node in enumerate(nodes) for number in node.gives}
    values = tuple(
        dataclasses.replace(meta, maker=place.get(number, -1)) for number, meta in enumerate(whole.values)
    )
    whole = dataclasses.replace(whole, nodes=nodes, values=values)
    return dataclasses.replace(whole, pins=_pins(whole))


def _used(whole: Record) -> tuple[Node, ...]:
    """Without calls whose result nobody used, and without renames that nobody asked for."""
    wanted = set(whole.outputs)
    kept: list[Node] = []
    for node in reversed(whole.nodes):
        renames = tuple((old, new) for old, new in node.renames if new in wanted)
        written = bool(node.writes) or node.anchored or isinstance(node.call, (Leaf, SetBuffer))
        if written or renames or any(number in wanted for number in node.gives):
            node = dataclasses.replace(node, renames=renames)
            wanted.update(node.takes)
            kept.append(node)
    return tuple(reversed(kept))


def _freed(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Marks what follows from inputs alone. Such nodes run in every stage that needs them."""
    bound: set[int] = set()
    marked = []
    for node in nodes:
        free = not (node.names or node.random or node.flops or node.anchored or isinstance(node.call, Leaf))
        free = free and not any(number in bound for number in node.takes)
        if not free:
            bound.update(node.gives)
        marked.append(dataclasses.replace(node, free=free))
    return tuple(marked)


def _pins(whole: Record) -> tuple[tuple[int, int], ...]:
    """Stretches of nodes that no cut may part.

    - who writes into memory that other values, used later, lie in as well: with the makers of all that lie there. Sent, they would lie apart
    - who uses a buffer or parameter that the forward writes into: all of them
    - hooks of tensors: with the tensor's maker
    """
    place = {number: at for at, node in enumerate(whole.nodes) for number in node.gives}
    free = {number for node in whole.nodes if node.free for number in node.gives}
    pins: list[tuple[int, int]] = []
    uses: dict[str, list[int]] = {}
    written: set[str] = set()
    for at, node in enumerate(whole.nodes):
        for name in node.names:
            uses.setdefault(name, []).append(at)
        written.update(node.writes)
        memory = {whole.values[old].storage for old, _ in node.renames}
        group = {number for number in node.takes if whole.values[number].storage in memory or node.anchored}
        if len(group) > 1 or node.anchored:
            family = group | {number for number in place if whole.values[number].storage in memory}
            makers = [place[number] for number in family if number in place and number not in free]
            pins.append((min([at, *makers]), at))
    pins += [(uses[name][0], uses[name][-1]) for name in sorted(written)]
    return tuple((lo, hi) for lo, hi in pins if lo < hi)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A placeholder has the strides of one number, which views would stumble over."""
    if is_placeholder(tensor):
        with mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return mode.from_tensor(tensor)


def _swap_state(model: nn.Module, fakes: dict[int, Tensor]) -> None:
    for module in model.modules():
        for state in (module._parameters, module._buffers):
            for name, tensor in state.items():
                if tensor is not None:
                    state[name] = fakes[id(tensor)]  # type: ignore[assignment]


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Whatever the forward does to attributes of modules is undone."""
    before = [
        (module, dict(module.__dict__), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for state, old in ((module._parameters, parameters), (module._buffers, buffers)):
                state.clear()
                state.update(old)  # type: ignore[arg-type]


@contextlib.contextmanager
def _hooks(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Ours is the first hook before a module and the last one after it."""

    handles = []
    for path, module in model.named_modules():
        if path:
            leaf = is_leaf(module)
            names = (
                tuple(recorder.names[id(t)] for t in (*module.parameters(), *module.buffers()))
                if leaf
                else ()
            )
            handles.append(
                module.register_forward_pre_hook(recorder.enter(path, leaf), prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(recorder.leave(path, leaf, names), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _never(packed: Any) -> Any:
    raise AssertionError("a recorded forward has no backward")
