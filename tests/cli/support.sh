# What the tests of the command share. Each check names what failed; finish tells whether any did.
# shellcheck shell=sh
set -u
: "${TENSORBUS:?the tool to test}"
: "${TB_GOLDEN:?the folder with the golden files}"

unset TENSORBUS_LOG TENSORBUS_BUCKET_SIZE TENSORBUS_STAGING_BYTES TENSORBUS_MAX_IN_FLIGHT TENSORBUS_PLAN_BYTES \
    TENSORBUS_COPY \
    TENSORBUS_STORE TENSORBUS_AGENT TENSORBUS_GROUP TENSORBUS_INDEX TENSORBUS_SIZE TENSORBUS_TOKEN_FILE
export LC_ALL=C

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
out=$tmp/out
err=$tmp/err
failures=0

fail() {
    printf 'FAILED: %s\n' "$*"
    failures=$((failures + 1))
}

# run ARG...: runs the tool; sets $status, fills $out and $err.
run() {
    "$TENSORBUS" "$@" >"$out" 2>"$err" </dev/null
    status=$?
}

# expect_status N WHAT
expect_status() {
    [ "$status" -eq "$1" ] || fail "$2: exit status $status instead of $1: $(head -c 300 "$err")"
}

# accepted ARG...: runs the tool, which must succeed and say nothing on stderr.
accepted() {
    run "$@"
    expect_status 0 "$*"
    [ ! -s "$err" ] || fail "$*: said $(head -c 300 "$err")"
}

# refused PATTERN ARG...: the tool must exit with 2, print nothing, and say one sentence that matches PATTERN.
refused() {
    pattern=$1
    shift
    run "$@"
    expect_status 2 "$*"
    [ ! -s "$out" ] || fail "$*: printed something although it failed"
    [ "$(wc -l <"$err")" -eq 1 ] || fail "$*: said $(wc -l <"$err") lines instead of one"
    grep -q '^tensorbus[a-z ]*: ' "$err" || fail "$*: no prefix: $(cat "$err")"
    grep -q -e "$pattern" "$err" || fail "$*: expected '$pattern': $(cat "$err")"
}

# printed PATTERN: the last output must have a line that matches.
printed() {
    grep -q -e "$1" "$out" || fail "expected '$1' in: $(head -c 1500 "$out")"
}

# not_printed PATTERN
not_printed() {
    ! grep -q -e "$1" "$out" || fail "did not expect '$1' in: $(head -c 1500 "$out")"
}

# lines N: the last output must have this many lines.
lines() {
    [ "$(wc -l <"$out")" -eq "$1" ] || fail "$(wc -l <"$out") lines instead of $1: $(head -c 1500 "$out")"
}

# is_exactly TEXT: the last output must be this line.
is_exactly() {
    printf '%s\n' "$1" | cmp -s - "$out" || fail "expected '$1' but got '$(head -c 1500 "$out")'"
}

finish() {
    [ "$failures" -eq 0 ] || exit 1
    exit 0
}
