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
for service in gateway worker relayctl; do
  cargo cyclonedx --quiet --format json --describe crate --manifest-path "services/$service/Cargo.toml"
done
# It writes beside every manifest of the workspace.
for service in gateway worker relayctl; do
  mv "services/$service"/*.cdx.json "$out/$service.cdx.json"
done
find . -name '*.cdx.json' -not -path './target/*' -not -path "$out/*" -newer "$0" -delete
