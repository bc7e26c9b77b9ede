#!/bin/sh
# Writes the stubs beside their .proto files, with imports that start at `triptych.protos`.
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
"${BIN:-.venv/bin}/python" -m grpc_tools.protoc -Itriptych/protos=protos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/*.proto
