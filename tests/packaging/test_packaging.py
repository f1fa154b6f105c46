"""What is shipped: packages, files, dependencies and commands agree with the checkout and with each other."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("server", "engine", "cache", "kernels", "clients")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _packages_on_disk() -> set[str]:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("__init__.py")]
    return {"artesian." + ".".join(file.parent.relative_to(ROOT).parts) for file in files}


def test_every_package_is_listed() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == _packages_on_disk()


@pytest.mark.parametrize("room", ROOMS)
def test_static_tools_see_each_room_through_a_relative_link(room: str) -> None:
    assert (ROOT / ".src" / "artesian" / room).readlink() == Path("../..") / room


def _imports(folder: Path) -> set[str]:
    """The names of the third-party packages that the modules under a folder import."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    own = {file.stem for file in (ROOT / "tests" / "support").iterdir()}
    return found - sys.stdlib_module_names - own - {"artesian"}


def _declared(*extras: str) -> set[str]:
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = [PROJECT["project"]["dependencies"], *(optional[extra] for extra in extras)]
    return {_normal(re.split(r"[\[<>=;~! ]", item)[0]) for items in wanted for item in items}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _undeclared(modules: set[str], declared: set[str]) -> set[str]:
    providers = packages_distributions()
    return {
        module
        for module in modules
        if declared.isdisjoint(_normal(name) for name in providers.get(module, [module]))
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_declared_dependencies(room: str) -> None:
    assert not _undeclared(_imports(ROOT / room), _declared("torch", "cuda", "bench"))


def test_tests_import_only_declared_dependencies() -> None:
    assert not _undeclared(_imports(ROOT / "tests"), _declared("torch", "cuda", "bench", "dev"))


def test_constraints_pin_every_declared_dependency_for_any_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==([\w.]+)( ; .+)?", line) for line in lines]
    assert [line for line, pin in zip(lines, pins, strict=True) if pin is None] == []  # no URL, no +cpu
    names = {_normal(pin[1]) for pin in pins if pin}
    assert _declared("torch", "cuda", "dev") - {"artesian"} <= names


def test_readme_and_ci_use_the_makefiles_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for text in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", ROOT / "Dockerfile"):
        used = set(re.findall(r"(?:^|`|RUN )make ([a-z]+)", text.read_text(), re.MULTILINE))
        assert used and used <= targets, text.name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing of an older build gets in and nothing is left behind."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.so")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, source)
    return next(built.glob("artesian-*.whl"))


@pytest.mark.slow
def test_a_wheel_carries_code_types_c_sources_and_pages(wheel: Path) -> None:
    kinds = {".py", ".typed", ".c", ".h", ".html", ".css", ".js", ".mjs"}
    files = [file.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("*.*")]
    wanted = {  # the TypeScript client is a package of its own
        f"artesian/{file}" for file in files if file.suffix in kinds and "typescript" not in file.parts
    }
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= shipped
    assert not [name for name in shipped if not name.startswith("artesian")]


@pytest.mark.long
@pytest.mark.timeout(300)  # it installs some forty packages
def test_a_wheel_runs_in_a_fresh_environment_without_torch(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    assert "torch" not in _run(*pip, "list", "--format=freeze")
    assert _run(tmp_path / "bin" / "artesian", "--version").strip() == PROJECT["project"]["version"]
    _run(
        python, "-P", "-c", "import artesian.server.app, artesian.engine.local, artesian.kernels.cpu.backend"
    )


def test_serving_on_the_cpu_imports_no_torch() -> None:
    _run(
        sys.executable, "-P", "-c",
        "import sys, artesian.server.app, artesian.server.serve, artesian.engine.local;"
        "import artesian.kernels.cpu.backend;"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)",
    )  # fmt: skip


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
