#!/bin/sh
# Builds Triptych's images with docker, podman or buildah. usage: build.sh [proxy | worker-cpu | worker-cuda | worker-vllm ...]
# Without names: proxy and worker-cpu. Settings, by environment:
#   IMAGE_BUILDER     docker, podman or buildah; the first one that works by default
#   IMAGE_PREFIX      what stands before "proxy" in the names: triptych-, as the Helm chart has it
#   IMAGE_TAG         the images' tag: the version in triptych/__init__.py
#   IMAGE_BASE        the image that all build on: docker.io/library/python:3.11-slim
#   IMAGE_BUILD_ARGS  more words for the builder, like "--build-arg PIP_INDEX_URL=<your index>"
#   PIP_TORCH_ARGS    words for the torch install, like "--index-url <index of CPU wheels>"
set -eu
cd "$(dirname "$0")/../.."

fail() {
  echo "images: $1" >&2
  exit 2
}

# Why a builder cannot be used; nothing where it can.
trouble() {
  command -v "$1" >/dev/null || { echo "$1 is not installed"; return; }
  case $1 in
    docker) docker version >/dev/null 2>&1 || echo "docker reaches no daemon: start one, or set DOCKER_HOST" ;;
    podman) podman info >/dev/null 2>&1 || echo "podman does not work: \`podman info\` says why" ;;
    buildah) buildah info >/dev/null 2>&1 || echo "buildah does not work: \`buildah info\` says why (STORAGE_DRIVER=vfs helps where overlay is missing)" ;;
    *) echo "it is none of docker, podman, buildah" ;;
  esac
}

choose() {
  reasons=
  for builder in ${IMAGE_BUILDER:-docker podman buildah}; do
    reason=$(trouble "$builder")
    [ -n "$reason" ] || return 0
    reasons="$reasons
  $builder: $reason"
  done
  fail "nothing here can build images:$reasons
Remedy, on Debian as root: apt-get install buildah crun (it needs no daemon), or say IMAGE_BUILDER=..."
}

# Builder's own words: buildah runs without a daemon and namespaces; --format docker keeps the HEALTHCHECK.
build() {
  case $builder in
    docker) docker build "$@" ;;
    podman) podman build --format docker "$@" ;;
    buildah) BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} buildah bud --format docker --pull=false $policy "$@" ;;
  esac
}

# Debian's buildah comes without the file that says which signatures an image needs; everyone's says: none.
signature_policy() {
  [ "$builder" = buildah ] || return 0
  [ -e /etc/containers/policy.json ] || [ -e "$HOME/.config/containers/policy.json" ] && return 0
  policy_file=$(mktemp)
  trap 'rm -f "$policy_file"' EXIT
  echo '{"default": [{"type": "insecureAcceptAnything"}]}' > "$policy_file"
  policy="--signature-policy $policy_file"
}

policy=
choose
signature_policy
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' triptych/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
base=${IMAGE_BASE:-docker.io/library/python:3.11-slim}
for target in ${*:-proxy worker-cpu}; do
  file=deploy/docker/$target.Dockerfile
  [ -f "$file" ] || fail "there is no image \"$target\": choose of proxy, worker-cpu, worker-cuda, worker-vllm"
  name=${IMAGE_PREFIX-triptych-}$target:${IMAGE_TAG:-$version}
  echo "images: $name by $builder, from $base"
  set -- --build-arg "BASE=$base" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  [ "$target" = proxy ] || set -- "$@" --build-arg "PIP_TORCH_ARGS=${PIP_TORCH_ARGS:-}"
  # Unquoted: IMAGE_BUILD_ARGS is several words.
  build -f "$file" -t "$name" "$@" ${IMAGE_BUILD_ARGS:-} . || fail "$name was not built:
  a base that cannot be fetched: IMAGE_BASE=<an image you have>, or make one: sh deploy/docker/base.sh
  packages that cannot be fetched: IMAGE_BUILD_ARGS=\"--build-arg PIP_INDEX_URL=<your index>\", or
  IMAGE_BUILD_ARGS=\"\$(python3 deploy/docker/host_pip.py)\" for this machine's own pip settings (podman, buildah)"
done
