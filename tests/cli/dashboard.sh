#!/bin/sh
# tensorbus dashboard, and its page in a browser where there is one.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

for place in '' x 65536 ::1:80; do
    refused '--listen takes .ADDRESS:.PORT, not' dashboard --listen "$place"
done
refused 'there is no token' dashboard --token-file /dev/null

export XDG_RUNTIME_DIR="$tmp/runtime"
mkdir -m 0700 "$XDG_RUNTIME_DIR" "$XDG_RUNTIME_DIR/tensorbus"
python3 -B "$(dirname -- "$0")/dashboard.py" "$TENSORBUS" "$XDG_RUNTIME_DIR/tensorbus" >"$out" 2>&1 || fail "$(cat "$out")"
cat "$out"

finish
