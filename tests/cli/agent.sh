#!/bin/sh
# tensorbus agent: what bad options get, and agents that are driven with raw bytes.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

refused '^tensorbus agent: --name is missing' agent
refused '^tensorbus agent: --store is missing' agent --name a --rank 0 --size 1
refused "^tensorbus agent: --rank 2 is none of the 2 seats" agent --name a --rank 2 --size 2 --store "unix:$tmp/s"
refused "^tensorbus agent: --rank takes a number" agent --name a --rank x --size 2 --store "unix:$tmp/s"
refused "there is no token" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --token-file /dev/null

# UCX would end the process
(
    # shellcheck disable=SC3045 # Debian's and Ubuntu's sh has it
    ulimit -n 28
    run agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "$tmp/a" --transport ucx
    expect_status 1 'UCX with too few descriptors'
    grep -q "^tensorbus agent: opening UCX takes 32 file descriptors: .*its RLIMIT_NOFILE is 28" "$err" || fail "$(cat "$err")"
    [ "$failures" -eq 0 ]
) || exit 1

# sockets stay in the user's folder
mkdir -m 700 "$tmp/run"
for name in ../../outside sub/name /tmp/outside .hidden ..; do
    XDG_RUNTIME_DIR=$tmp/run refused "^tensorbus agent: --name '$name' can't be the name of a socket" \
        agent --name "$name" --rank 0 --size 1 --store "unix:$tmp/s"
done
long=$(printf '%0120d' 0)
XDG_RUNTIME_DIR=$tmp/run refused "^tensorbus agent: the path of the agent's socket has [1-9][0-9]* bytes, and may have 107: .*/run/tensorbus/0.*; choose a shorter --name, or give --socket" \
    agent --name "$long" --rank 0 --size 1 --store "unix:$tmp/s"
refused "^tensorbus agent: the path of the agent's socket has 121 bytes, and may have 107: /0" \
    agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "/$long"
[ -z "$(find "$tmp" -name '*.sock')" ] || fail "sockets: $(find "$tmp" -name '*.sock')"

printf 'open\000sesame\n' >"$tmp/nul"
refused "the token in .*/nul has a NUL byte; it must be text" \
    agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --token-file "$tmp/nul"

# tokens of up to 510 bytes
head -c 510 /dev/zero | tr '\0' x >"$tmp/longest"
head -c 511 /dev/zero | tr '\0' x >"$tmp/too_long"
refused "a token of 511 bytes; 510 are allowed" \
    agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --token-file "$tmp/too_long"
"$TENSORBUS" agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --socket "$tmp/a" --token-file "$tmp/longest" \
    >"$out" 2>"$err" &
agent=$!
tries=0
until "$TENSORBUS" status --socket "$tmp/a" --token-file "$tmp/longest" >"$tmp/status" 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -ge 200 ] || ! kill -0 "$agent" 2>/dev/null; then
        fail "no agent: $(cat "$err" "$tmp/status")"
        break
    fi
    sleep 0.1
done
grep -q '^a 0' "$tmp/status" || fail "status: $(cat "$tmp/status")"
kill "$agent" 2>/dev/null
wait "$agent"

mkdir "$tmp/agents"
python3 -B "$(dirname -- "$0")/agent_raw.py" "$TENSORBUS" "$tmp/agents" >"$out" 2>&1 || fail "$(cat "$out")"
[ -z "$(ls -A "$tmp/agents")" ] || fail "left behind: $(ls -A "$tmp/agents")"

finish
