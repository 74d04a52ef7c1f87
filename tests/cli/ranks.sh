# What the tests of commands that fork ranks share: what they leave behind does not go unnoticed.
# shellcheck shell=sh
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

TMPDIR=$tmp/t
export TMPDIR
mkdir "$TMPDIR" || exit 1

# clean WHAT: the command has removed its folder
clean() {
    [ -z "$(ls -A "$TMPDIR")" ] || fail "$1: left $(ls -A "$TMPDIR") behind"
}

# in_session PID: what is alive in the session that PID has begun, as "pid parent" lines
in_session() {
    cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^\([0-9]*\) (.*) \([A-Za-z]\) /\1 \2 /' |
        awk -v session="$1" '$5 == session && $2 != "Z" && $2 != "X" { print $1, $3 }'
}

# ranks: the processes that the command has forked, oldest first
ranks() {
    in_session "$job" | awk -v parent="$job" '$2 == parent { print $1 }' | sort -n
}

# is_running: the command has not ended, as one has that only waits to be waited for
is_running() {
    case $(sed 's/.*) //' "/proc/$job/stat" 2>/dev/null) in
    '' | Z* | X*) return 1 ;;
    esac
}

# nothing_left: waits until the session is empty, for a minute at most
nothing_left() {
    tries=0
    while [ -n "$(in_session "$job")" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 1200 ] || return 1
        sleep 0.05
    done
}

# start ARG...: starts the command as $job, in a session of its own, where the shell would have it ignore SIGINT, and
# waits until it has 8 ranks, or has ended
start() {
    setsid env --default-signal=INT "$TENSORBUS" "$@" >"$out" 2>"$err" </dev/null &
    job=$!
    while is_running && [ "$(ranks | wc -l)" -lt 8 ]; do
        sleep 0.01
    done
}

# hold: stops the first rank, so that the command can't come to its end; false if it came before
hold() {
    first=$(ranks | head -n 1)
    [ -n "$first" ] && kill -STOP "$first" 2>/dev/null || return 1
    [ "$(ranks | wc -l)" -lt 8 ] || return 0
    kill -CONT "$first"
    return 1
}

# ended STATUS PATTERN WHAT: $job must end with this status, one sentence, and without a trace
ended() {
    wait "$job" 2>/dev/null
    status=$?
    expect_status "$1" "$3"
    [ ! -s "$out" ] || fail "$3: printed something although it was ended"
    [ "$(wc -l <"$err")" -eq 1 ] || fail "$3: said $(wc -l <"$err") lines instead of one: $(cat "$err")"
    grep -q -e "$2" "$err" || fail "$3: expected '$2': $(cat "$err")"
    [ -z "$(in_session "$job")" ] || fail "$3: left processes behind: $(in_session "$job")"
    clean "$3"
}
