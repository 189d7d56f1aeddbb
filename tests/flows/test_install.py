"""The package as somebody else installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

BUILD_S = 500
"""The first build in a clone compiles the core; later ones find it compiled."""

SCRIPT = """
import echelon, torch
from echelon import native
run = echelon.init()
assert "site" in echelon.__file__, echelon.__file__
assert "site" in native.core().__file__, native.core()
model = run.prepare(torch.nn.Linear(2, 2))
print("world", run.world_size)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + 100)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (made,) = folder.glob("*.whl")
    return made


def pip(what, *options):
    argv = [sys.executable, "-m", "pip", what, "-q", "--disable-pip-version-check", "--no-deps", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.case("pip install and use from outside the clone")
def test_it_installs_and_works_from_outside_the_clone(tmp_path, wheel):
    site = tmp_path / "site"
    pip("install", "--target", str(site), str(wheel))
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHELON_")} | {"PYTHONPATH": str(site)}
    run = subprocess.run([str(site / "bin" / "echelon"), "run", "--workers", "2", "train.py"], cwd=tmp_path, env=env,
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "world 2" in run.stdout


@pytest.mark.case("a wheel holds the package and the core, nothing else")
def test_a_wheel_holds_every_module_and_the_compiled_core_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / "echelon").rglob("*.py")}
    core = f"echelon/native/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert package == in_tree | {core}
    about = {Path(name).name for name in names - package}
    assert about == {"METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt"}


def test_a_wheel_says_for_which_machines_it_is(wheel):
    """A compiled core is for one Python and one platform: a wheel for any would be taken where it cannot work."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/WHEEL")]
        about = file.read(name).decode()
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"Tag: {version}-{version}-linux_" in about
    assert "Root-Is-Purelib: false" in about
