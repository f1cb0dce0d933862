#!/bin/sh
# Gathers the whole content of the image into a new folder: the three binaries, the shared libraries that they name, the
# certificates of public authorities, and an account without rights. No shell, no package manager.
#
#   deploy/rootfs.sh BINARIES FOLDER
#
# BINARIES holds relay-gateway, relay-worker and relayctl. Libraries and certificates are those of the machine this runs on,
# which must be of the architecture that the image is for. With SOURCE_DATE_EPOCH set, all files carry that time.
set -eu

[ $# -eq 2 ] || { echo "usage: $0 BINARIES FOLDER" >&2; exit 2; }
binaries=$1
root=$2
[ ! -e "$root" ] || { echo "$root exists already" >&2; exit 2; }
umask 022

mkdir -p "$root/usr/bin" "$root/etc/ssl/certs" "$root/tmp" "$root/var/lib/relay/files"
chmod 1777 "$root/tmp"
for name in relay-gateway relay-worker relayctl; do
  # Symbols stay in the build folder; line tables would triple the image.
  strip --strip-all -o "$root/usr/bin/$name" "$binaries/$name"
  chmod 0755 "$root/usr/bin/$name"
done

# The libraries that the dynamic linker would load, each under its search path.
for name in relay-gateway relay-worker relayctl; do
  ldd "$binaries/$name" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }'
done | sort -u | while read -r library; do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
  chmod 0755 "$root$library"
done

authorities=/etc/ssl/certs/ca-certificates.crt
[ -s "$authorities" ] || { echo "$authorities is missing: install ca-certificates" >&2; exit 1; }
cp -L "$authorities" "$root$authorities"

echo 'relay:x:65532:65532:relay:/:/sbin/nologin' > "$root/etc/passwd"
echo 'relay:x:65532:' > "$root/etc/group"
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
# A folder of files for one host; Kubernetes and compose mount theirs over it.
if [ "$(id -u)" -eq 0 ]; then
  chown -R 0:0 "$root"
  chown 65532:65532 "$root/var/lib/relay" "$root/var/lib/relay/files"
fi

if [ -n "${SOURCE_DATE_EPOCH:-}" ]; then
  find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
fi
