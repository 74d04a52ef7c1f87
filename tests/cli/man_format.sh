#!/bin/sh
# Man pages: the formatters that are installed take them without a warning.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

pages=$(dirname -- "$TENSORBUS")/man
found=0

for page in "$pages"/*.1; do
    [ -s "$page" ] || fail "no pages in $pages"
    if command -v groff >/dev/null; then
        found=1
        groff -man -ww -Tascii "$page" >"$out" 2>"$err" || fail "groff fails on $page"
        [ ! -s "$err" ] || fail "groff: $page: $(head -c 500 "$err")"
        grep -q 'All went well' "$out" || fail "groff makes nothing of $page"
    fi
    if command -v mandoc >/dev/null; then
        found=1
        mandoc -T lint -W error "$page" >"$out" 2>&1 || fail "mandoc: $page: $(head -c 500 "$out")"
    fi
done

if [ "$found" -eq 0 ] && [ "$failures" -eq 0 ]; then
    echo "skipped: neither groff nor mandoc is installed"
    exit 77
fi
finish
