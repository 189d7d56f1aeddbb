"""A tree of plain objects as JSON and tensors, and back, exactly. Nothing is imported or called by a name in a file.

What JSON has (None, True, a list, a string, a dict of strings, …) is written as it is; everything else as an object
with the key "$", which names one of the kinds below. Tensors and arrays stand beside the JSON, under their number.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint import kinds
from echelon.errors import CheckpointError

TAG = "$"
MAX_DEPTH = 120
PLAIN_INT = 1 << 53
"""Integers up to here are the same in every reader of JSON."""

FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, list, dict, set, tuple)}
"""What a defaultdict may make."""


def encode(tree: Any, what: str = "objects") -> tuple[bytes, list[Tensor]]:
    """JSON, and the tensors it refers to: on the CPU, copied, so that later changes of the tree change nothing."""
    encoder = _Encoder()
    plain = encoder.encode(tree, what, 0)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode(), encoder.tensors


def decode(text: bytes, tensors: Callable[[int], Tensor], where: str = "objects") -> Any:
    """The tree again. `tensors` gives the tensor with a number. CheckpointError when the JSON is none of ours."""
    try:
        return _Decoder(tensors).decode(json.loads(text))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"{where} cannot be read: {type(error).__name__}: {error}",
            remedy="It is damaged, or was written by a newer version: use an older checkpoint.",
        ) from None


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._above: set[int] = set()

    def encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) <= PLAIN_INT else {TAG: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
        leaf = self._leaf(value, kind)
        if leaf is not None:
            return leaf
        if depth >= MAX_DEPTH or id(value) in self._above:
            how = "contains itself" if id(value) in self._above else f"is more than {MAX_DEPTH} levels deep"
            raise CheckpointError(f"{path} {how} and cannot be saved", remedy="Save what it is made from.")
        self._above.add(id(value))
        try:
            return self._container(value, kind, path, depth + 1)
        finally:
            self._above.discard(id(value))

    def _leaf(self, value: Any, kind: type) -> Any:
        if kind is complex:
            return {TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "base64": base64.b64encode(value).decode()}
        if kind is range:
            return {TAG: "range", "of": [hex(n) for n in (value.start, value.stop, value.step)]}
        if kind in (Tensor, torch.nn.Parameter) and _is_dense(value):
            return {TAG: "tensor", "number": self._keep(_copy(value)), "dtype": kinds.name_of(value.dtype)}
        if isinstance(value, torch.dtype):
            return {TAG: "dtype", "name": kinds.name_of(value)} if value in kinds.FILE_NAMES else None
        if kind is torch.device:
            return {TAG: "device", "name": str(value)}
        if kind is torch.Size:
            return {TAG: "size", "of": list(value)}
        if kind is type(Path()):
            return {TAG: "path", "name": str(value)}
        if isinstance(value, np.dtype):
            return {TAG: "numpy.dtype", "name": value.str} if _is_simple(value) else None
        if kind is np.ndarray and _is_simple(value.dtype):
            raw = (
                torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else _NO_BYTES
            )
            return {
                TAG: "numpy",
                "number": self._keep(raw),
                "dtype": value.dtype.str,
                "shape": list(value.shape),
            }
        if isinstance(value, np.generic) and _is_simple(value.dtype) and kind is value.dtype.type:
            return {TAG: "numpy.scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        return None

    def _container(self, value: Any, kind: type, path: str, depth: int) -> Any:
        if kind is list:
            return self._items(value, path, depth)
        if kind in (tuple, deque):
            tagged = {TAG: kind.__name__, "of": self._items(value, path, depth)}
            return tagged if kind is tuple else tagged | {"maxlen": value.maxlen}
        if kind in (set, frozenset):
            items = [self.encode(item, f"{path}{{…}}", depth) for item in value]
            return {TAG: kind.__name__, "of": sorted(items, key=json.dumps)}
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{path}[{key!r}]", depth) for key, item in value.items()}
        if kind in (dict, OrderedDict, Counter):
            return {TAG: kind.__name__, "of": self._pairs(value, path, depth)}
        if kind is defaultdict and (
            value.default_factory is None or value.default_factory in FACTORIES.values()
        ):
            made = value.default_factory
            return {
                TAG: "defaultdict",
                "of": self._pairs(value, path, depth),
                "factory": made and made.__name__,
            }
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which is no plain object and cannot be saved",
            remedy=_advice(value),
        )

    def _items(self, items: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{number}]", depth) for number, item in enumerate(items)]

    def _pairs(self, value: Any, path: str, depth: int) -> list[list[Any]]:
        return [
            [
                self.encode(key, f"{path} (the key {key!r})", depth),
                self.encode(item, f"{path}[{key!r}]", depth),
            ]
            for key, item in value.items()
        ]

    def _keep(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class _Decoder:
    def __init__(self, tensors: Callable[[int], Tensor]) -> None:
        self._tensors = tensors

    def decode(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.decode(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if TAG not in plain:
            return {key: self.decode(item) for key, item in plain.items()}
        kind = plain[TAG]
        if kind in ("tensor", "numpy", "numpy.scalar", "numpy.dtype"):
            return self._array(kind, plain)
        if kind in ("tuple", "set", "frozenset", "deque"):
            items = [self.decode(item) for item in plain["of"]]
            made = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
            return made(items) if made else deque(items, plain["maxlen"])
        if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
            return self._mapping(kind, plain)
        return self._leaf(kind, plain)

    def _leaf(self, kind: str, plain: dict[str, Any]) -> Any:
        match kind:
            case "int":
                return int(plain["hex"], 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(plain["bits"]))[0]
            case "complex":
                return complex(*struct.unpack(">dd", bytes.fromhex(plain["bits"])))
            case "bytes":
                return base64.b64decode(plain["base64"])
            case "bytearray":
                return bytearray(base64.b64decode(plain["base64"]))
            case "range":
                return range(*(int(n, 16) for n in plain["of"]))
            case "dtype":
                return kinds.NAMES[plain["name"]]
            case "device":
                return torch.device(str(plain["name"]))
            case "size":
                return torch.Size(plain["of"])
            case "path":
                return Path(plain["name"])
        raise ValueError(f"unknown kind {kind!r}")

    def _array(self, kind: str, plain: dict[str, Any]) -> Any:
        if kind == "tensor":
            tensor = self._tensors(int(plain["number"]))
            dtype = kinds.NAMES[plain["dtype"]]
            return torch.view_as_complex(tensor) if dtype.is_complex and not tensor.is_complex() else tensor
        dtype_ = np.dtype(str(plain["dtype"] if kind != "numpy.dtype" else plain["name"]))
        if not _is_simple(dtype_):
            raise ValueError(f"{dtype_} holds objects")
        if kind == "numpy.dtype":
            return dtype_
        if kind == "numpy.scalar":
            return np.frombuffer(bytes.fromhex(plain["hex"]), dtype_)[0]
        raw = self._tensors(int(plain["number"])).numpy().tobytes()
        return np.frombuffer(bytearray(raw), dtype_).reshape(plain["shape"])

    def _mapping(self, kind: str, plain: dict[str, Any]) -> Any:
        pairs = [(self.decode(key), self.decode(item)) for key, item in plain["of"]]
        if kind == "Counter":
            counted: Counter[Any] = Counter()
            for key, item in pairs:
                counted[key] = item
            return counted
        if kind == "defaultdict":
            factory = plain["factory"]
            return defaultdict(None if factory is None else FACTORIES[factory], pairs)
        return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, real, and nobody else's."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    held = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return torch.view_as_real(held) if held.is_complex() else held


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype in kinds.FILE_NAMES


def _is_simple(dtype: np.dtype[Any]) -> bool:
    """Is the type whole in its short name? Structured types and objects are not."""
    return dtype.kind in "biufcmMSU" and np.dtype(dtype.str) == dtype


def _advice(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "Save it as tuple(…) or as a dict with _asdict()."
    if hasattr(value, "value") and hasattr(value, "name"):
        return "Save its .value."
    if isinstance(value, (dict, list, int, float, str)):
        base = next(base.__name__ for base in (dict, list, int, float, str) if isinstance(value, base))
        return f"Save it as {base}(…)."
    if isinstance(value, Tensor):
        return f"It is {value.dtype}, {value.layout}, on {value.device}: save a plain tensor, such as to_dense()."
    if callable(getattr(value, "state_dict", None)):
        return "Save its state_dict() instead."
    return "Turn it into numbers, strings, lists, dicts or tensors in state_dict(), and back in load_state_dict()."
