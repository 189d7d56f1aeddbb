"""The shape of the package: imports go down, most of it needs no torch, nothing asks "distributed?", nothing is huge."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "echelon"

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "clock",
        "env",
        "coding",
        "verdict",
        "demands",
        "spelling",
        "copying",
        "strategy",
        "event",
        "events",
        "hostevents",
        "faults",
        "dumps",
        "activity",
    ),
    ("mesh", "native"),
    ("comm", "control"),
    ("data", "elastic", "checkpoint", "ps"),
    ("parallel",),
    (
        "prepare",
        "loop",
        "step",
        "closures",
        "away",
        "judging",
        "apart",
        "replay",
        "prepared",
        "sharding",
        "piped",
        "staging",
        "vertical",
        "placing",
        "whole",
        "owed",
        "sources",
        "keeping",
        "rejoin",
        "expected",
        "tally",
        "facts",
        "build",
        "run",
        "failure",
        "dynamo",
        "preload",
        "forkserver",
        "role",
    ),
    (
        "launch",
        "show",
        "torchrun",
        "start",
        "bench",
        "explain",
        "backend",
        "torch_backend",
        "cli",
        "__main__",
    ),
)
"""docs/map.md, from the bottom up. A unit is a package or a module directly under echelon/."""

ENGINES = ("data", "elastic", "checkpoint", "ps")
"""Layer 3: they meet only through layers 1 and 2, so they do not know each other."""

NEEDS_TORCH = (
    "native",
    "comm",
    "data",
    "checkpoint",
    "parallel",
    "prepare",
    "loop",
    "step",
    "closures",
    "away",
    "judging",
    "apart",
    "replay",
    "prepared",
    "sharding",
    "piped",
    "staging",
    "vertical",
    "placing",
    "whole",
    "owed",
    "sources",
    "keeping",
    "rejoin",
    "expected",
    "tally",
    "facts",
    "build",
    "run",
    "torchrun",
    "start",
    "backend",
    "torch_backend",
)
"""Everything else imports with torch blocked, so that launcher and command line start in milliseconds."""

RUN_BY_NAME = ("echelon.bench.comm_worker",)
"""Needs torch, and nobody imports it: it is the script of a run."""

ALONE_NEEDS_TORCH = (
    "echelon.explain.rehearsal",
    "echelon.explain.words",
    "echelon.ps.optimizers",
    "echelon.ps.memory",
    "echelon.ps.pending",
    "echelon.ps.window",
    "echelon.ps.link",
    "echelon.ps.service",
    "echelon.ps.attend",
    "echelon.ps.host",
    "echelon.ps.tables",
    "echelon.ps.client",
    "echelon.ps.together",
    "echelon.ps.before",
    "echelon.ps.shard",
    "echelon.ps.session",
    "echelon.ps.shared",
    "echelon.ps.copies",
    "echelon.ps.mirror",
    "echelon.ps.judge",
    "echelon.ps.looking",
    "echelon.ps.adding",
    "echelon.ps.route",
    "echelon.ps.site",
    "echelon.ps.held",
    "echelon.ps.worker",
    "echelon.ps.pretend",
    "echelon.ps.steps",
    "echelon.ps.taking",
    "echelon.ps.desk",
    "echelon.ps.live",
    "echelon.ps.dealing",
    "echelon.ps.assembly",
    "echelon.ps.noting",
    "echelon.ps.parts",
    "echelon.ps.outer",
    "echelon.ps.local",
    "echelon.ps.owned",
)
"""Needs torch, while the rest of its package does not."""

MAX_FUNCTION_LINES = 80

LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}


@dataclass(frozen=True)
class Import:
    """One import of ours: `module` is the full name, `typing_only` when it stands under `if TYPE_CHECKING`."""

    module: str
    line: int
    typing_only: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def unit(module: str) -> str:
    """echelon.control.rpc -> control; echelon -> "" (the lazy face, which may name anything)."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str, path: Path) -> Iterator[Import]:
    """All imports of the module, those inside functions too."""
    yield from _walk(ast.parse(path.read_text()), module, path.name == "__init__.py", False)


def _walk(node: ast.AST, module: str, is_package: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "echelon":
                    yield Import(alias.name, child.lineno, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = module.split(".")[: None if is_package and child.level == 1 else -child.level]
                base = ".".join([*above, *filter(None, [child.module])])
            if base.split(".")[0] == "echelon":
                for alias in child.names:
                    inner = f"{base}.{alias.name}"
                    yield Import(inner if inner in MODULES else base, child.lineno, typing_only)
        elif isinstance(child, ast.If) and ast.unparse(child.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for inner in child.body:
                yield from _walk(ast.Module([inner], []), module, is_package, True)
            for inner in child.orelse:
                yield from _walk(ast.Module([inner], []), module, is_package, typing_only)
        else:
            yield from _walk(child, module, is_package, typing_only)


def test_every_module_has_a_layer_and_every_name_in_the_table_a_module():
    units = {unit(module) for module in MODULES} - {""}
    assert units == set(LAYER_OF)


@pytest.mark.case("layers")
def test_imports_go_down():
    wrong = []
    for module, path in MODULES.items():
        mine = unit(module)
        if not mine:
            continue
        for found in imports(module, path):
            theirs = unit(found.module)
            if found.typing_only or theirs == mine:
                continue
            where = f"{path.relative_to(ROOT)}:{found.line}"
            if not theirs:
                wrong.append(f"{where} imports through the public face: name the module")
            elif LAYER_OF[theirs] > LAYER_OF[mine]:
                wrong.append(
                    f"{where} (layer {LAYER_OF[mine]}) imports {found.module} (layer {LAYER_OF[theirs]})"
                )
            elif mine in ENGINES and theirs in ENGINES:
                wrong.append(f"{where}: the engine {mine} imports the engine {theirs}")
    assert wrong == []


def test_what_is_marked_so_imports_without_torch():
    others = ("echelon.__main__", *RUN_BY_NAME, *ALONE_NEEDS_TORCH)
    free = [m for m in MODULES if unit(m) not in NEEDS_TORCH and m not in others]
    program = f"""
import importlib, sys, traceback
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocked())
sys.modules["torch"] = None
wrong = []
for name in {free!r}:
    try:
        importlib.import_module(name)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong.append(f"{{name}}: {{error}} ({{where.filename}}:{{where.lineno}})")
print("\\n".join(wrong))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


ASKS_BY_NAME = ("is_distributed", "is_initialized")
COUNTS = ("size", "world_size", "workers", "num_workers")
ALLOWED = {
    "explain/words.py": "the plural of a sentence",
    "facts.py": "the first lines of a run are sentences: one worker, two workers; what differs from one process",
    "launch/local.py": "the plural of a sentence",
    "show/progress.py": "a sentence names the worker only when there are several",
    "show/state.py": "a display of one worker's run needs no average",
}
"""Where the number of workers may be asked for: only in what people read."""


def test_nothing_asks_whether_it_is_distributed():
    """One process is a mesh of one rank; only comm/ knows the difference."""
    wrong = []
    for path in MODULES.values():
        short = path.relative_to(PACKAGE).as_posix()
        if short.startswith("comm/") or short in ALLOWED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if _asks(node):
                wrong.append(f"echelon/{short}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_the_list_of_those_who_may_ask_is_no_longer_than_it_must_be():
    idle = [
        short
        for short in ALLOWED
        if not any(_asks(node) for node in ast.walk(ast.parse((PACKAGE / short).read_text())))
    ]
    assert idle == []


def _asks(node: ast.AST) -> bool:
    """`world_size > 1`, `1 == group.size`, `dist.is_initialized()`, … but not torch.cuda.is_initialized."""
    if isinstance(node, ast.Call):
        words = ast.unparse(node.func).split(".")
        return words[-1] in ASKS_BY_NAME and "cuda" not in words
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    counts = any(_last_name(side) in COUNTS for side in sides)
    return counts and any(isinstance(side, ast.Constant) and side.value in (1, 2) for side in sides)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.case("import echelon < 50 ms")
@pytest.mark.case("echelon --help < 200 ms")
def test_import_and_help_are_quick():
    """import echelon < 50 ms, echelon --help < 200 ms of processor time, beyond what python itself takes: the best of 25 each,
    since others use the machine too."""
    commands = {
        "pass": [sys.executable, "-c", "pass"],
        "import": [sys.executable, "-c", "import echelon"],
        "help": [sys.executable, "-m", "echelon", "--help"],
    }
    best = dict.fromkeys(commands, float("inf"))
    for number in range(25):
        if number >= 5 and best["import"] - best["pass"] < 0.050 and best["help"] - best["pass"] < 0.200:
            break
        for name, command in commands.items():
            began = _children_s()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            best[name] = min(best[name], _children_s() - began)
    assert best["import"] - best["pass"] < 0.050
    assert best["help"] - best["pass"] < 0.200


def _children_s() -> float:
    """Processor seconds of the processes that were waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_no_function_is_over_80_lines():
    long = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{module}.{node.name}"] = lines
    assert long == {}


SOMEBODYS_FOLDER = re.compile(r"(?<![\w.$}])/(?:root|work|home/\w+|Users/\w+)(?![\w-])")


@pytest.mark.needs("clone")
def test_no_file_names_a_folder_of_somebodys_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    assert listed.returncode == 0, listed.stderr
    here = Path(__file__).resolve()
    wrong = []
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        path = ROOT / name
        if path == here or not path.is_file():
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if SOMEBODYS_FOLDER.search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:100]}")
    assert wrong == []
