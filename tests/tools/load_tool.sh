#!/bin/sh
# A load tool, the package $2 ("guidellm==0.8.1"), in an environment of its own in the folder $1, beside all packages of
# PYTHON's environment: torch and transformers are not installed twice, and what the tool wants in another release goes
# before ours in its environment only. pip's own variables say where packages are.
set -eu
home=${1:?a folder to install into}

mkdir -p "$home"
"$PYTHON" -m venv "$home/venv"
packages=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$packages/beside.pth"
"$home/venv/bin/python" -m pip -q install "${2:?a package}"
touch "$home/.installed"
