"""`setup.sh`: how it finds Python 3.10, and what it says when there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("sh", "cat", "cksum", "mktemp", "rm", "tail", "grep", "mkdir", "chmod", "cp", "dirname")

# Stands for an interpreter in .venv: is version 3.10, notes how pip is called, loads Courier.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*version_info*) exit 0 ;;
*"import courier"*) {courier} ;;
*) echo "python $*" >>{log} ;;
esac
"""
FAKE_VENV = """mkdir -p .venv/bin && cp {fake} .venv/bin/python"""


@pytest.fixture
def folder(tmp_path):
    for name in ("setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        os.symlink(shutil.which(tool), tmp_path / "bin" / tool)
    return tmp_path


def put(folder, name, script):
    path = folder / "bin" / name
    path.write_text(script)
    path.chmod(0o755)


def make_fakes(folder, courier="exit 0"):
    """Puts in place what a python3.10 or uv will copy to .venv."""
    fake = folder / "fake_python"
    fake.write_text(FAKE_PYTHON.format(courier=courier, log=folder / "log"))
    fake.chmod(0o755)
    return FAKE_VENV.format(fake=fake)


def run(folder, modules="a.py b.py"):
    return subprocess.run(
        ["./setup.sh", modules],
        cwd=folder,
        env={"PATH": str(folder / "bin"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def log(folder):
    path = folder / "log"
    return path.read_text() if path.exists() else ""


def python310(folder, **kwargs):
    make = make_fakes(folder, **kwargs)
    put(folder, "python3.10", f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{make}\n')


def test_python310_is_taken_first(folder):
    python310(folder)
    put(folder, "uv", "#!/bin/sh\necho called uv >&2; exit 1\n")
    result = run(folder)
    assert result.returncode == 0, result.stderr
    assert "called uv" not in result.stderr
    assert "--constraint constraints.txt" in log(folder)
    assert "--editable .[dev]" in log(folder)


def test_python310_that_does_not_work_is_passed_over(folder):
    """As pyenv's shim of a version that is not installed."""
    put(folder, "python3.10", "#!/bin/sh\necho 'pyenv: not installed' >&2; exit 127\n")
    put(folder, "uv", f"#!/bin/sh\n{make_fakes(folder)}\n")
    result = run(folder)
    assert result.returncode == 0, result.stderr


def test_uv_is_asked_for_python310(folder):
    put(folder, "uv", f'#!/bin/sh\necho "uv $*" >>{folder}/log\n{make_fakes(folder)}\n')
    assert run(folder).returncode == 0
    assert "--python 3.10 .venv" in log(folder)


def test_uv_is_installed_to_a_folder_that_is_thrown_away(folder):
    make = make_fakes(folder)
    put(
        folder,
        "python3",
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do [ "$1" = --target ] && target=$2; shift; done\n'
        f'mkdir -p "$target/bin"; echo "$target" >>{folder}/targets\n'
        f'printf "#!/bin/sh\\n{make}\\n" >"$target/bin/uv"; chmod +x "$target/bin/uv"\n',
    )
    assert run(folder).returncode == 0
    (target,) = (folder / "targets").read_text().split()
    assert not Path(target).exists()


@pytest.mark.parametrize("uv", [None, "#!/bin/sh\nexit 1\n"])
def test_without_any_the_three_ways_are_named(folder, uv):
    if uv:
        put(folder, "uv", uv)
    result = run(folder)
    assert result.returncode == 1
    for words in ("Python 3.10", "system's packages", "pyenv install 3.10", "pip install uv"):
        assert words in result.stderr
    assert not (folder / ".venv").exists()


def test_nothing_is_installed_twice(folder):
    python310(folder)
    assert run(folder).returncode == 0
    calls = log(folder)
    again = run(folder)
    assert again.returncode == 0
    assert again.stdout == ""
    assert log(folder) == calls


@pytest.mark.parametrize("change", ["pyproject.toml", "constraints.txt", "modules"])
def test_change_of_what_is_installed_installs_again(folder, change):
    python310(folder)
    assert run(folder).returncode == 0
    calls = log(folder)
    if change == "modules":
        assert run(folder, "a.py b.py new.py").returncode == 0
    else:
        with (folder / change).open("a") as file:
            file.write("# changed\n")
        assert run(folder).returncode == 0
    assert log(folder) == 2 * calls


def test_interrupted_installation_is_taken_up_again(folder):
    python310(folder, courier="echo 'ImportError: broken'; exit 1")
    result = run(folder)
    assert result.returncode == 1
    assert "ImportError: broken" in result.stderr
    python310(folder)
    shutil.copy(folder / "fake_python", folder / ".venv" / "bin" / "python")
    assert run(folder).returncode == 0


def test_missing_shared_library_is_explained(folder):
    library = "libpython3.10.so.1.0: cannot open shared object file"
    python310(folder, courier=f"echo 'ImportError: {library}'; exit 1")
    result = run(folder)
    assert result.returncode == 1
    assert "--enable-shared" in result.stderr
    assert not (folder / ".venv" / "installed").exists()


def test_setup_is_up_to_date_here():
    """The environment that runs this test is the one that `make` would make."""
    assert Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    result = subprocess.run(
        ["make", "--no-print-directory", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == ""
