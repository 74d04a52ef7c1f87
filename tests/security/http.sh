#!/bin/sh
# /metrics and /status are for this machine unless another address is asked for, which takes a token.
tmp=$(mktemp -d)
trap 'kill "$agent" 2>/dev/null; wait "$agent" 2>/dev/null; rm -rf "$tmp"' EXIT
failed=0

# listens PLACE ADDRESS [OPTION...]: an agent with --http PLACE listens at ADDRESS, as the kernel writes it, and says so in its URL.
listens() {
    place=$1 address=$2
    shift 2
    : >"$tmp/out"
    "$TENSORBUS" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "$tmp/a" --http "$place" "$@" >"$tmp/out" 2>&1 &
    agent=$!
    tries=0
    while ! grep -q '^metrics at ' "$tmp/out" && kill -0 "$agent" 2>/dev/null && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    port=$(sed -n 's,^metrics at http://.*:\([0-9]*\)/metrics$,\1,p' "$tmp/out")
    at=$(printf '%s:%04X' "$address" "$port")
    if ! grep -q "^ *[0-9]*: $at 00000000:0000 0A" /proc/net/tcp; then
        printf 'FAILED: --http %s does not listen at %s: %s\n' "$place" "$at" "$(cat "$tmp/out")"
        failed=1
    fi
    kill "$agent"
    wait "$agent"
}

listens 0 0100007F
listens 127.0.0.1:0 0100007F
printf '%064d\n' 7 >"$tmp/token"
listens 0.0.0.0:0 00000000 --token-file "$tmp/token"
if timeout 60 "$TENSORBUS" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "$tmp/a" --http 0.0.0.0:0 >"$tmp/out" 2>&1 ||
    ! grep -q 'give --token-file, or listen on loopback' "$tmp/out"; then
    printf 'FAILED: --http 0.0.0.0:0 without a token: %s\n' "$(cat "$tmp/out")"
    failed=1
fi
exit "$failed"
