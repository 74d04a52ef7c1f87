# What the tests with several hosts share. They run inside of tests/hosts/bed. Each check names what failed; finish tells
# whether any did.
# shellcheck shell=bash
set -u
: "${BED:?to be run by tests/hosts/bed N -- bash THIS}"
export LC_ALL=C

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
failures=0

fail() {
    printf 'FAILED: %s\n' "$*"
    failures=$((failures + 1))
}

finish() {
    [ "$failures" -eq 0 ] || exit 1
    exit 0
}
