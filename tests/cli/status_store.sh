#!/bin/sh
# tensorbus status --store.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

refused '--socket does not go with --store' status --store "unix:$tmp/s" --socket "$tmp/t"
refused '--watch needs --store URL' status --watch
refused '--interval needs --watch' status --store "unix:$tmp/s" --interval 1
refused '--interval takes seconds from 0.1 to 3600' status --store "unix:$tmp/s" --watch --interval 0
refused "no store is known for .nonsense." status --store nonsense

mkdir "$tmp/bus"
python3 -B "$(dirname -- "$0")/status_store.py" "$TENSORBUS" "$tmp/bus" >"$out" 2>&1 || fail "$(cat "$out")"

finish
