#!/bin/sh
# Groups that agents enter with a pair.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

mkdir "$tmp/agents"
python3 -B "$(dirname -- "$0")/groups.py" "$TENSORBUS" "$tmp/agents" >"$out" 2>&1 || fail "$(cat "$out")"
[ -z "$(ls -A "$tmp/agents")" ] || fail "left behind: $(ls -A "$tmp/agents")"

finish
