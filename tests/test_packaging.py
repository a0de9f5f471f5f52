"""`kernels/` is installed as `fs_inductor.kernels`, in every way to install, and never as `kernels`; what is public."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fs_inductor

ROOT = Path(__file__).resolve().parent.parent
# What is built here or is no part of the source.
NOT_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__", "shared")
DEVICE_MODULES = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run `command`; returns what it printed, and fails the test with all of it on an error."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def build_wheel(source: Path, out: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=out.parent)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout, its link kept, as builds leave files behind."""
    copy = tmp_path / "source"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return copy


class Environment:
    """A virtual environment that sees this one's packages, but not an fs_inductor installed here."""

    def __init__(self, folder: Path):
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
        # A plain path line: the .pth files behind it, editable installs among them, are not read.
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site / "parent.pth").write_text("\n".join(sorted(here)) + "\n")

    def run(self, code: str, cwd: Path) -> str:
        return run(self.python, "-c", code, cwd=cwd)

    def install(self, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        run(
            *pip,
            *("install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"),
            *arguments,
            cwd=self.site,
        )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


IMPORTS = f"""
import importlib, importlib.metadata, importlib.util, sys
import fs_inductor
for module in {DEVICE_MODULES}:
    importlib.import_module("fs_inductor.kernels." + module)
assert not [name for name in sys.modules if name.split(".")[0] == "kernels"], "two import names"
"""

INSTALLED = """
backend = importlib.metadata.entry_points(group="torch_dynamo_backends")["flashsampling"]
assert backend.load() is fs_inductor.backend.flashsampling
import torch
assert "flashsampling" in torch.compiler.list_backends()
print(fs_inductor.__file__)
"""

NO_KERNELS = """
assert importlib.util.find_spec("kernels") is None
"""


def test_wheel_holds_kernels_inside_the_package(source: Path, tmp_path: Path, environment: Environment):
    wheel = build_wheel(source, tmp_path / "wheel")
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if name.endswith(".py")}
    packages = {"fs_inductor": "fs_inductor", "fs_inductor/recognise": "fs_inductor/recognise"}
    packages["fs_inductor/kernels"] = "kernels"
    assert code == {
        f"{package}/{path.name}" for package, folder in packages.items() for path in (ROOT / folder).glob("*.py")
    }
    (top_level,) = (name for name in names if name.endswith("top_level.txt"))
    assert zipfile.ZipFile(wheel).read(top_level).decode().split() == ["fs_inductor"]
    assert any(name.endswith("licenses/LICENSE") for name in names)

    environment.install(wheel)
    where = environment.run(IMPORTS + INSTALLED + NO_KERNELS, cwd=tmp_path)
    assert where.startswith(str(environment.site))


def test_source_distribution_builds_the_same_wheel(source: Path, tmp_path: Path):
    out = tmp_path / "sdist"
    build = f"import setuptools.build_meta as build; build.build_sdist({str(out)!r})"
    out.mkdir()
    run(sys.executable, "-c", build, cwd=source)
    (archive,) = out.glob("*.tar.gz")
    from_archive = build_wheel(archive, tmp_path / "one")
    from_checkout = build_wheel(source, tmp_path / "two")
    assert sorted(zipfile.ZipFile(from_archive).namelist()) == sorted(zipfile.ZipFile(from_checkout).namelist())


@pytest.mark.parametrize("mode", ["default", "compat"])
def test_editable_install(source: Path, environment: Environment, mode: str, tmp_path: Path):
    settings = [] if mode == "default" else ["--config-settings=editable_mode=compat"]
    environment.install("--editable", source, *settings)
    # The older mode puts the checkout on the path, where kernels/ looks like a namespace package.
    checks = IMPORTS + INSTALLED + (NO_KERNELS if mode == "default" else "")
    assert environment.run(checks, cwd=tmp_path).startswith(str(source))
    assert not (environment.site / "kernels").exists()


def test_bare_checkout_beside_a_package_called_kernels(environment: Environment):
    foreign = environment.site / "kernels"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("OWNER = 'somebody else'\n")
    in_root = f"""
import kernels
assert kernels.OWNER == "somebody else", kernels
assert kernels.__file__ == {str(foreign / "__init__.py")!r}
del sys.modules["kernels"]
"""
    where = environment.run("import sys\n" + in_root + IMPORTS + "print(fs_inductor.__file__)", cwd=ROOT)
    assert where.startswith(str(ROOT))


def test_public_names_are_listed():
    """Those that are imported on first use too: shells complete what `dir` lists."""
    assert set(fs_inductor.__all__) <= set(dir(fs_inductor))
    assert all(hasattr(fs_inductor, name) for name in dir(fs_inductor))


def test_no_module_makes_kernels_a_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert os.readlink(ROOT / "fs_inductor" / "kernels") == "../kernels"
