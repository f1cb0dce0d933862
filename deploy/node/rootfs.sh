#!/bin/sh
# Makes a new folder with the content of a node's image. `system/`: a minimal Debian with what agent programs need (a
# shell, libc, terminal descriptions, certificates), the broker, and an account without rights. `owned/`: the folders of
# that account, apart because a build gives everything else to root.
#
#   deploy/node/rootfs.sh BINARIES FOLDER [MIRROR]
#
# BINARIES holds agent-relay-broker, built on the same Debian or an older one. Needs debootstrap and root.
set -eu

[ $# -eq 2 ] || [ $# -eq 3 ] || { echo "usage: $0 BINARIES FOLDER [MIRROR]" >&2; exit 2; }
binaries=$1
folder=$2
root=$folder/system
[ ! -e "$folder" ] || { echo "$folder exists already" >&2; exit 2; }
command -v debootstrap > /dev/null || { echo "debootstrap is missing" >&2; exit 1; }
umask 022

mkdir -p "$folder/owned/state" "$folder/owned/workspace"
debootstrap --variant=minbase --include=ca-certificates,ncurses-base,procps bookworm "$root" ${3:+"$3"}
# What only an installation needs.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/doc/* "$root"/usr/share/man/*

strip --strip-all -o "$root/usr/bin/agent-relay-broker" "$binaries/agent-relay-broker"
chmod 0755 "$root/usr/bin/agent-relay-broker"
echo 'relay:x:65532:65532:relay:/var/lib/relay:/bin/bash' >> "$root/etc/passwd"
echo 'relay:x:65532:' >> "$root/etc/group"

if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
  find "$folder" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
fi
