"""What is installed: every module, its types, the command, and one version of each package."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parent.parent
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("agents", "launch")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()  # A copy, since setuptools leaves a build folder behind.
    for name in ("agents", "launch", "pyproject.toml", "README.md"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_module_and_the_type_markers(wheel):
    names = [n for n in wheel.namelist() if ".dist-info/" not in n]
    expected = [f"headrace/{name}" for name in [*MODULES, "agents/py.typed", "launch/py.typed"]]
    assert sorted(names) == sorted(expected)


def test_wheel_installs_the_command(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "headrace = headrace.launch.cli:main" in wheel.read(name).decode()


def test_every_package_is_listed():
    packages = {"headrace." + str(Path(name).parent).replace("/", ".") for name in MODULES}
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_dependency_is_pinned_and_installed_as_pinned():
    project = PROJECT["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pinned = {normal(name): version for name, version in pins().items()}
    for requirement in wanted:
        name = normal(re.split(r"[=<>~! ]", requirement)[0])
        assert importlib.metadata.version(name) == pinned[name]


def test_nothing_is_installed_that_is_not_pinned():
    installed = {normal(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    assert installed - {normal(name) for name in pins()} == {"headrace", "pip"}


def test_there_is_one_launchpad():
    """Its nightly builds overwrite the files of the release."""
    names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
    assert [n for n in names if "launchpad" in n.lower()] == ["dm-launchpad"]


@pytest.mark.parametrize(
    "module",
    [
        "headrace.agents.acting",
        "headrace.agents.environments",
        "headrace.agents.evaluation",
        "headrace.agents.impala",
        "headrace.agents.networks",
        "headrace.agents.variables",
        "headrace.launch.cli",
        "headrace.launch.local",
        "headrace.launch.nodes.actor",
        "headrace.launch.nodes.learner",
        "headrace.launch.nodes.reporter",
        "headrace.launch.nodes.variable_source",
        "headrace.launch.program",
        "headrace.launch.view",
    ],
)
def test_light_parts_do_not_load_tensorflow(module):
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("agents/")])
def test_agents_know_nothing_of_the_launcher(name):
    imported = []
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module)
    assert not [m for m in imported if m.startswith(("launchpad", "courier", "headrace.launch"))]
