"""What of a machine decides the values that are compared: which bits come out, how many calls and instructions."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from platform import machine as architecture

import torch

from echelon import native

Kind = dict[str, str]

DECIDES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "ONEDNN_")
"""Environment variables by which libraries choose their code."""
INSTRUCTIONS = re.compile(r"(avx|amx|sse4|asimd|sve).*|fma|f16c|fphp|bf16|i8mm")


def of_bits() -> Kind:
    """What decides the last bit of a sum: the code that libraries choose for a processor. All cells compute with one thread."""
    processor, flags = _processor()
    libc = " ".join(platform.libc_ver())
    return {
        "processor": f"{architecture()} {processor}",
        "instructions": " ".join(flags),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "libc": libc,
        **{name: value for name, value in sorted(os.environ.items()) if _decides(name)},
    }


def of_calls() -> Kind:
    """What decides how many calls of Python functions a step takes, and how much it sends."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
    }


def of_instructions() -> Kind:
    """What decides how many instructions a loop of the core is: who compiled it, for what."""
    core = native.core()
    found = re.findall(
        rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", Path(core.__file__).read_bytes() if core else b""
    )
    sets = [name for name in core.isas() if name != "avx512"] if core else []  # callgrind knows no AVX-512
    return {
        "architecture": architecture(),
        "sets": " ".join(sets),
        "compiler": b", ".join(sorted(set(found))).decode() or "not known",
    }


def shown(kind: Kind) -> str:
    """In one line."""
    return " · ".join(value for name, value in kind.items() if name != "instructions")


def _decides(name: str) -> bool:
    return name.startswith(DECIDES) and not name.endswith("_NUM_THREADS")


def _processor() -> tuple[str, list[str]]:
    """Its maker, family and model, and the sets of instructions for numbers that it (or what it is a guest of) offers."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    said = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    who = [
        said[name]
        for name in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
        if name in said
    ]
    flags = said.get("flags", said.get("Features", "")).split()
    return " ".join(who), sorted(flag for flag in flags if INSTRUCTIONS.fullmatch(flag))
