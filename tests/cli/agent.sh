#!/bin/sh
# tensorbus agent: what bad options get, and agents that are driven with raw bytes.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

refused '^tensorbus agent: --name is missing' agent
refused '^tensorbus agent: --store is missing' agent --name a --rank 0 --size 1
refused "^tensorbus agent: --rank 2 is none of the 2 seats" agent --name a --rank 2 --size 2 --store "unix:$tmp/s"
refused "^tensorbus agent: --rank takes a number" agent --name a --rank x --size 2 --store "unix:$tmp/s"
refused "there is no token" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --token-file /dev/null

mkdir "$tmp/agents"
python3 -B "$(dirname -- "$0")/agent_raw.py" "$TENSORBUS" "$tmp/agents" >"$out" 2>&1 || fail "$(cat "$out")"
[ -z "$(ls -A "$tmp/agents")" ] || fail "left behind: $(ls -A "$tmp/agents")"

finish
