#!/bin/sh
# Fails when the committed stubs are not what the .proto files generate.
set -eu
cd "$(dirname "$0")/.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/triptych/protos"
BIN=${BIN:-.venv/bin} sh protos/generate.sh "$tmp"
for f in "$tmp"/triptych/protos/*_pb2*; do
  cmp "$f" "protos/$(basename "$f")" || { echo "protos differ: run make proto"; exit 1; }
done
