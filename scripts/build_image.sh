#!/bin/sh
# Build kvkeep's image where no registry can be reached: over a base of Debian's packages, with
# buildah, which needs neither a daemon nor namespaces here.
#
#   scripts/build_image.sh [NAME [FILE [OPTION…]]]
#
# NAME is localhost/kvkeep:latest and FILE deploy/container/Containerfile by default; options are
# those of `buildah build`.
#
# Needs root, and Debian's packages buildah and debootstrap. pip in the build has the settings of pip
# here; MOUNTS names files and folders that these settings name.
set -eu
cd "$(dirname "$0")/.."

name=${1:-localhost/kvkeep:latest}
file=${2:-deploy/container/Containerfile}
shift $(($# < 2 ? $# : 2))
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
base=localhost/kvkeep-base:$suite
store=${STORE:-$PWD/build/images}

buildah() {
  command buildah --root "$store/root" --runroot "$store/run" --storage-driver vfs "$@"
}

mkdir -p "$store"
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  echo "== a base of Debian $suite"
  root=$(mktemp -d)
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$root" "$mirror" >"$store/debootstrap.log"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  made=$(buildah from scratch)
  buildah add --quiet "$made" "$root" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$made"
  buildah commit --quiet --rm "$made" "$base" >/dev/null
  rm -rf "$root"
fi

echo "== $name"
set -- "$@" --build-arg "BASE=$base"
case $file in *.vllm) ;; *) set -- "$@" --build-arg "TORCH_INDEX=${TORCH_INDEX-}" ;; esac
pip config list | awk -F= '
  { name = $1; sub(/^.*\./, "", name); value = substr($0, length($1) + 2); gsub(/^'"'"'|'"'"'$/, "", value) }
  !(name in seen) { seen[name] = 1; lines = lines name " = " value "\n" }
  END { printf "[global]\n%s", lines }' >"$store/pip.conf"
set -- "$@" --volume "$store/pip.conf:/etc/pip.conf:ro"
for place in ${MOUNTS-}; do
  set -- "$@" --volume "$place:$place:ro"
done
# In Docker's format, which keeps the health check.
buildah build --isolation chroot --format docker --file "$file" \
  --ignorefile .containerignore --tag "$name" "$@" .
buildah images "$name"
