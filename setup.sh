#!/bin/sh
# Makes .venv with Python 3.10 and the pinned packages, unless it is up to date. Called by make.
set -eu

# What the installation depends on: a change of any of it, or an interrupted installation, is a
# reason to run pip again.
wanted=$( { echo "$1"; cat pyproject.toml constraints.txt setup.sh; } | cksum)
stamp=.venv/installed
if [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

is_310() {
    "$@" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null
}

make_venv() {
    # Debian's python3.10 may lack its venv module.
    if is_310 python3.10 && python3.10 -m venv --clear .venv; then
        return
    fi
    uv=$(command -v uv || true)
    if [ -z "$uv" ]; then
        tools=$(mktemp -d)
        trap 'rm -rf "$tools"' EXIT
        echo "No Python 3.10 here: asking uv for one."
        python3 -m pip install --quiet --target "$tools" uv >/dev/null 2>&1 || return 1
        uv=$tools/bin/uv
    fi
    "$uv" venv --quiet --seed --clear --python 3.10 .venv
}

if ! is_310 .venv/bin/python; then
    if ! make_venv || ! is_310 .venv/bin/python; then
        rm -rf .venv
        echo "Headrace needs Python 3.10, since Launchpad has no wheels for newer ones. Either" >&2
        echo "  install it with your system's packages, so that python3.10 runs, or" >&2
        echo "  install it with pyenv (pyenv install 3.10), or" >&2
        echo "  install uv (pip install uv), which fetches it." >&2
        exit 1
    fi
fi

echo "Installing the pinned packages into .venv (about 2 GB on disk; a minute or two) ..."
pip=".venv/bin/python -m pip --disable-pip-version-check install --quiet"
# dm-acme has no wheel; with these two present it is built without a network look-up per step.
$pip --constraint constraints.txt setuptools wheel
$pip --constraint constraints.txt --no-build-isolation --use-pep517 \
    --config-settings editable_mode=strict --editable '.[dev]'

if ! error=$(.venv/bin/python -c 'import courier' 2>&1); then
    echo "$error" | tail -n 1 >&2
    case $error in
    *libpython*)
        echo "This Python 3.10 was built without its shared library, which Launchpad needs." >&2
        echo "Install libpython3.10 with your system's packages, or rebuild Python:" >&2
        echo "  PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force 3.10" >&2
        ;;
    esac
    exit 1
fi
echo "$wanted" >$stamp
