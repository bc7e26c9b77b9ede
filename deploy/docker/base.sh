#!/bin/sh
# Makes a base image out of Debian's packages, for machines that reach no image registry. usage: base.sh [NAME]
# NAME is the name that the Dockerfiles' FROM wants. Needs mmdebstrap, and docker, podman or buildah. By environment:
#   IMAGE_BUILDER  docker, podman or buildah; the first one that is installed by default
#   DEBIAN_SUITE   bookworm by default, with Python 3.11
#   DEBIAN_SOURCE  a mirror, or a file of apt sources
set -eu
name=${1:-docker.io/library/python:3.11-slim}
suite=${DEBIAN_SUITE:-bookworm}
source=${DEBIAN_SOURCE:-http://deb.debian.org/debian}

fail() {
  echo "base: $1" >&2
  exit 2
}

command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing: apt-get install mmdebstrap"
for builder in ${IMAGE_BUILDER:-buildah podman docker} none; do
  [ "$builder" = none ] && fail "no docker, podman or buildah: apt-get install buildah crun"
  command -v "$builder" >/dev/null && break
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv \
  --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  "$suite" "$folder/base.tar" "$source" || fail "no Debian from $source: DEBIAN_SOURCE=<a mirror or a file of sources>"
case $builder in
  docker | podman) "$builder" import "$folder/base.tar" "$name" ;;
  buildah)
    container=$(buildah from scratch)
    buildah add -q "$container" "$folder/base.tar" / >/dev/null
    buildah config --cmd python3 "$container"
    buildah commit -q --rm --format docker "$container" "$name"
    ;;
esac
echo "base: $name, $(du -m "$folder/base.tar" | cut -f1) MB of Debian $suite"
