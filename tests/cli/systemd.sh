#!/bin/sh
# The systemd unit: it knows the agent's options, its variables are in the example file, and systemd takes it.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

dist=$(dirname -- "$0")/../../dist/systemd
unit=$dist/tensorbus-agent@.service

accepted agent --help
options=$(sed -n '/^ExecStart=/,/[^\\]$/p' "$unit" | grep -o -e '--[a-z][a-z-]*' | sort -u)
[ "$(printf '%s\n' "$options" | wc -l)" -eq 5 ] || fail "options in the unit: $options"
for option in $options $(grep -o -e '--[a-z][a-z-]*' "$dist/agent.env" | sort -u); do
    printed "^  $option "
done
variables=$(sed -n '/^ExecStart=/,/[^\\]$/p' "$unit" | grep -o 'AGENT_[A-Z]*' | sort -u)
for variable in $variables; do
    [ "$variable" = AGENT_RANK ] || grep -q "^#\{0,1\}$variable=" "$dist/agent.env" || fail "agent.env lacks $variable"
done

if ! command -v systemd-analyze >/dev/null; then
    [ "$failures" -eq 0 ] || finish
    echo "skipped: systemd-analyze is not installed"
    exit 77
fi
sed "s|/usr/bin/tensorbus|$TENSORBUS|" "$unit" >"$tmp/tensorbus-agent@.service"
systemd-analyze verify --man=no "$tmp/tensorbus-agent@0.service" >"$out" 2>&1 || fail "it is refused: $(cat "$out")"
[ ! -s "$out" ] || fail "systemd-analyze says: $(cat "$out")"

finish
