#!/usr/bin/env bash
# Writes an OCI image layout with `capstan run`: the program, the C library it links, CA certificates, and nothing else.
#
#   deploy/image.sh BINARY LAYOUT [TAG]
#
# Needs umoci (Debian: apt install umoci; UMOCI names another program). No daemon, no root, no base image. The C library and the
# certificates are those of this machine, which must be able to run BINARY. SBOM names a CycloneDX file that goes into the image.
#
#   ARCH=arm64 SYSROOT=/usr/aarch64-linux-gnu deploy/image.sh BINARY LAYOUT [TAG]
#
# makes an image for another architecture: SYSROOT has its C library, and readelf (binutils) reads what BINARY needs of it. Nobody has
# run such an image yet.
set -euo pipefail
binary=$1 layout=$2 tag=${3:-0.1.0}
umoci=${UMOCI:-umoci}
certificates=/etc/ssl/certs/ca-certificates.crt
case ${ARCH:-$(uname -m)} in
x86_64 | amd64) architecture=amd64 ;;
aarch64 | arm64) architecture=arm64 ;;
*) architecture=${ARCH:-$(uname -m)} ;;
esac

# Prints the loader and the libraries of the program, at the paths where the loader searches them.
libraries() {
    if [ -z "${SYSROOT:-}" ]; then
        ldd "$binary" | grep -o '/[^ ]*'
        return
    fi
    readelf --program-headers "$binary" | sed -n 's/.*program interpreter: \(.*\)]/\1/p'
    readelf --dynamic "$binary" | sed -n 's/.*Shared library: \[\(.*\)]/\1/p' | while read -r library; do
        (cd "$SYSROOT" && find lib/ lib64/ usr/lib/ usr/lib64/ -name "$library" -print -quit 2>/dev/null || true) | sed 's|^|/|'
    done
}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
install -D -m 0755 "$binary" "$root/capstan"
libraries | while read -r library; do
    install -D -m 0755 "$(realpath "${SYSROOT:-}$library")" "$root$library"
done
install -D -m 0644 "$certificates" "$root$certificates"
mkdir -p "$root/tmp" "$root/var/run/secrets/kubernetes.io/serviceaccount"
chmod 0755 "$root"
chmod 1777 "$root/tmp"
echo 'nonroot:x:65532:65532:nonroot:/:/nologin' >"$root/etc/passwd"
echo 'nonroot:x:65532:' >"$root/etc/group"
if [ -n "${SBOM:-}" ]; then
    install -D -m 0644 "$SBOM" "$root/usr/share/doc/capstan/sbom.cdx.json"
fi
# The same files make the same image.
created=@${SOURCE_DATE_EPOCH:-0}
find "$root" -exec touch --no-dereference --date="$created" {} +
created=$(date --utc --date="$created" +%FT%TZ)

rm -rf "$layout"
"$umoci" init --layout "$layout"
"$umoci" new --image "$layout:$tag"
"$umoci" insert --rootless --image "$layout:$tag" --history.created "$created" --history.created_by image.sh "$root" /
"$umoci" config --image "$layout:$tag" --history.created "$created" --created "$created" \
    --os linux --architecture "$architecture" --config.user 65532:65532 --config.env MALLOC_ARENA_MAX=1 \
    --config.entrypoint /capstan --config.cmd run --config.cmd --log-format=json \
    --config.label org.opencontainers.image.title=capstan \
    --config.label "org.opencontainers.image.description=Runs the machines under Kubernetes clusters" \
    --config.label org.opencontainers.image.licenses=Apache-2.0 \
    --config.label "org.opencontainers.image.version=$tag"
"$umoci" gc --layout "$layout"
(cd "$root" && find . -type f -printf '%9s %p\n' | sort -rn)
echo "$layout:$tag: $(du -sb "$layout/blobs" | cut -f1) bytes compressed"
