#!/bin/sh
# tensorbus demo: three plans, each checked.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

accepted demo
for n in 1 2 3; do
    printed "^$n\\. "
done
[ "$(grep -c '^check     ok' "$out")" -eq 3 ] || fail "not every plan was checked"
printed BROADCAST
printed LOCAL
printed '^All 3 plans were made and checked; no data was moved\.'

finish
