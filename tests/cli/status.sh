#!/bin/sh
# tensorbus status and top, and what agents serve over HTTP.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

export XDG_RUNTIME_DIR="$tmp/runtime"
mkdir "$XDG_RUNTIME_DIR"

# failed PATTERN ARG...: exit status 1, and a sentence that matches PATTERN.
failed() {
    pattern=$1
    shift
    run "$@"
    expect_status 1 "$*"
    grep -q -e "$pattern" "$err" || fail "$*: expected '$pattern': $(cat "$err")"
}

refused '--all does not go with --socket' status --all --socket "$tmp/s"
for timeout in 0 -1 soon '' nan 1e9; do
    refused "--timeout takes seconds from 0.01 to 3600, not '$timeout'" status --timeout "$timeout"
done
for interval in 0 -1 fast '' nan 1e9; do
    refused "--interval takes seconds from 0.1 to 3600, not '$interval'" top --once --interval "$interval"
done
refused 'there is no token' status --token-file /dev/null
refused 'there is no token' top --token-file /dev/null
for place in '' x 65536 -1 :80 1.2.3.4 127.0.0.1: ::1:80 '[]:80' '80 '; do
    refused '--http takes .ADDRESS:.PORT, not' \
        agent --name a --rank 0 --size 1 --store "unix:$tmp/s" --http "$place"
done

# No agents.
failed "there is no agent in $XDG_RUNTIME_DIR/tensorbus" status
[ ! -s "$out" ] || fail "status without agents printed $(cat "$out")"
failed "there is no agent in $XDG_RUNTIME_DIR/tensorbus" top --once
failed "there is no socket $tmp/none" status --socket "$tmp/none" --timeout 3600 # at once
failed "there is no socket $tmp/none" top --socket "$tmp/none"

# A folder that others can write to is not believed.
mkdir -m 0777 "$XDG_RUNTIME_DIR/tensorbus"
chmod 0777 "$XDG_RUNTIME_DIR/tensorbus"
failed "is not this user's alone" status
rmdir "$XDG_RUNTIME_DIR/tensorbus"

mkdir "$tmp/agents"
python3 -B "$(dirname -- "$0")/status.py" "$TENSORBUS" "$tmp/agents" >"$out" 2>&1 || fail "$(cat "$out")"

finish
