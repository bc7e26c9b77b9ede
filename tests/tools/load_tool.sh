#!/bin/sh
# A tool in an environment of its own, the folder $2 of $1: what the group $2 of pyproject.toml names, beside all packages
# of PYTHON's environment. torch and transformers are not installed twice, and what the tool wants in another release goes
# before ours in its environment only. pip's own variables say where packages are.
set -eu
home=${1:?a folder to install into}/${2:?a group of pyproject.toml}

mkdir -p "$home"
"$PYTHON" -m venv "$home/venv"
packages=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$packages/beside.pth"
"$PYTHON" -c 'import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["dependency-groups"][sys.argv[1]], sep="\n")' "$2" > "$home/requirements.txt"
pip() { "$home/venv/bin/python" -m pip -q install "$@"; }

# Others after the first are there in place of its own requirements, among them that of a release of Python.
if [ "$(wc -l < "$home/requirements.txt")" -gt 1 ]; then
  pip --no-deps --ignore-requires-python "$(head -n 1 "$home/requirements.txt")"
  sed -i 1d "$home/requirements.txt"
fi
pip -r "$home/requirements.txt"
touch "$home/.installed"
