#!/bin/sh
# Makes the root of the node's image in a new folder: a minimal Debian with what agent programs need (a shell, libc,
# terminal descriptions, certificates), the broker, and an account without rights.
#
#   deploy/node/rootfs.sh BINARIES FOLDER [MIRROR]
#
# BINARIES holds agent-relay-broker, built on the same Debian or an older one. Needs debootstrap and root.
set -eu

[ $# -eq 2 ] || [ $# -eq 3 ] || { echo "usage: $0 BINARIES FOLDER [MIRROR]" >&2; exit 2; }
binaries=$1
root=$2
mirror=${3:-http://deb.debian.org/debian}
[ ! -e "$root" ] || { echo "$root exists already" >&2; exit 2; }
command -v debootstrap > /dev/null || { echo "debootstrap is missing" >&2; exit 1; }
umask 022

debootstrap --variant=minbase --include=ca-certificates,ncurses-base,procps bookworm "$root" "$mirror"
# What only an installation needs.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/doc/* "$root"/usr/share/man/*

strip --strip-all -o "$root/usr/bin/agent-relay-broker" "$binaries/agent-relay-broker"
chmod 0755 "$root/usr/bin/agent-relay-broker"
echo 'relay:x:65532:65532:relay:/home/relay:/bin/bash' >> "$root/etc/passwd"
echo 'relay:x:65532:' >> "$root/etc/group"
install -d -o 65532 -g 65532 -m 0700 "$root/home/relay" "$root/workspace"

if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
  find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
fi
