#!/bin/sh
# /metrics and /status are for this machine unless another address is asked for.
tmp=$(mktemp -d)
trap 'kill "$agent" 2>/dev/null; wait "$agent" 2>/dev/null; rm -rf "$tmp"' EXIT
failed=0

# listens PLACE ADDRESS: an agent with --http PLACE listens at ADDRESS, as the kernel writes it, and says so in its URL.
listens() {
    : >"$tmp/out"
    "$TENSORBUS" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "$tmp/a" --http "$1" >"$tmp/out" 2>&1 &
    agent=$!
    tries=0
    while ! grep -q '^metrics at ' "$tmp/out" && kill -0 "$agent" 2>/dev/null && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    port=$(sed -n 's,^metrics at http://.*:\([0-9]*\)/metrics$,\1,p' "$tmp/out")
    at=$(printf '%s:%04X' "$2" "$port")
    if ! grep -q "^ *[0-9]*: $at 00000000:0000 0A" /proc/net/tcp; then
        printf 'FAILED: --http %s does not listen at %s: %s\n' "$1" "$at" "$(cat "$tmp/out")"
        failed=1
    fi
    kill "$agent"
    wait "$agent"
}

listens 0 0100007F
listens 127.0.0.1:0 0100007F
listens 0.0.0.0:0 00000000
exit "$failed"
