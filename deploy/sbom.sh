#!/bin/sh
# Writes the bills of materials (CycloneDX, JSON) of the three binaries into a folder: every crate that is linked in, with version,
# licence and checksum.
#
#   cargo install cargo-cyclonedx --version 0.5.9 --locked
#   deploy/sbom.sh FOLDER
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

# One run writes beside the manifest of every member of the workspace; what is left of that goes, however this ends.
name=sbom-$$
trap 'find . -path ./target -prune -o -name "$name.json" -exec rm {} +' EXIT
cargo cyclonedx --quiet --format json --no-build-deps --override-filename "$name"
for service in gateway worker relayctl; do
  # Crates of the workspace are named by where they lie: below its root, wherever that is.
  sed "s|$PWD/||g" "services/$service/$name.json" > "$out/$service.cdx.json"
done
