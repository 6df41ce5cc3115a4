#!/bin/sh
# Make or update .venv: exact versions from constraints.txt, then agentrl itself, editable.
#
#   scripts/install.sh STAMP [EXTRAS]     e.g. scripts/install.sh .venv/.installed-dev dev
#
# Needs Python 3.11 or later and nothing else; $PYTHON names one. STAMP is touched at the very end, so an
# interrupted install leaves none, and the next one starts over.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
unfinished=$venv/.unfinished
stamp=$1
extras=${2:-}

die() {
    echo "install: $*" >&2
    exit 1
}

is_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or later"
        echo "$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3; do
        if is_python "$name"; then
            echo "$name"
            return
        fi
    done
    die "found no Python 3.11 or later; install one (Debian, Ubuntu: apt-get install python3-venv), or say PYTHON=/path/to/python3.11"
}

has_pip() {
    "$1" -m pip --version >/dev/null 2>&1
}

begin() {
    mkdir -p "$venv"
    touch "$unfinished"
}

# Debian's Python comes without ensurepip, which venv needs, and its pip is a package of its own.
make_venv() {
    python=$(find_python)
    begin
    "$python" -m venv "$venv" >/dev/null 2>&1 && has_pip "$venv/bin/python" && return
    if "$python" -m venv --without-pip "$venv" >/dev/null 2>&1; then
        for other in "$python" python3 python; do
            "$other" -m pip --python "$venv/bin/python" install -qq pip >/dev/null 2>&1 && return
        done
    fi
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "$python cannot make environments; installing $package"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq && apt-get -o DPkg::Lock::Timeout=300 install -y -qq "$package" >/dev/null &&
            "$python" -m venv --clear "$venv" && begin && return
    fi
    die "$python cannot make environments; install $package (Debian, Ubuntu: sudo apt-get install $package)"
}

# One install at a time: a second make waits here, and then finds the stamp.
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock 9
fi
if [ -e "$stamp" ] && [ -z "$(find pyproject.toml constraints.txt scripts/install.sh -newer "$stamp")" ]; then
    exit 0
fi

[ ! -e "$unfinished" ] || rm -rf "$venv"
if [ ! -e "$venv" ]; then
    make_venv
elif ! has_pip "$venv/bin/python" || ! is_python "$venv/bin/python"; then
    die "$venv holds no Python 3.11 or later with pip; remove it (make clean) and try again"
fi
begin

# --no-compile: Python compiles what is imported; compiling all of torch takes longer than that ever saves.
pip() {
    "$venv/bin/python" -m pip install -qq --no-compile --disable-pip-version-check \
        --root-user-action ignore --constraint constraints.txt "$@"
}

# torch alone first: with it in place nothing below can ask for another build of it.
version=$(sed -n 's/^torch==//p' constraints.txt)
echo "installing torch $version"
pip "torch==$version"
echo "installing agentrl${extras:+ with the extras $extras}"
pip --upgrade setuptools
pip --no-build-isolation --editable ".${extras:+[$extras]}"

rm "$unfinished"
touch "$venv/.installed" "$stamp"  # whatever the extras, it is all there
