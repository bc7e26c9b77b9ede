#!/bin/sh
# An environment in the folder $1 that has torchvision, and the packages named behind it ("transformers==5.24.0"), beside
# all packages of PYTHON's own environment, for the classes whose processors are on torchvision only. pip's own variables
# (PIP_INDEX_URL, PIP_FIND_LINKS, ...) say where packages are.
set -eu
home=${1:?a folder to install into}
shift
here=$(cd "$(dirname "$0")/../.." && pwd)

mkdir -p "$home"
"$PYTHON" -m venv "$home/venv"
packages=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$packages/beside.pth"
"$home/venv/bin/python" -m pip -q install --no-deps torchvision==0.28.0 "$@"
"$home/venv/bin/python" "$here/tests/tools/vllm_shims.py"
"$home/venv/bin/python" -c 'import torchvision'
touch "$home/.installed"
