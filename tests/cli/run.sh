#!/bin/sh
# tensorbus run: seats by the environment, prefixes, how it ends, signals; and programs that join and move a tensor.
# shellcheck source=tests/cli/support.sh
# shellcheck disable=SC2016 # the shells that are started expand these
. "$(dirname -- "$0")/support.sh"

TMPDIR=$tmp
XDG_RUNTIME_DIR=$tmp/runtime
export TMPDIR XDG_RUNTIME_DIR
mkdir -m 0700 "$XDG_RUNTIME_DIR"

sorted() {
    sort "$out" >"$tmp/sorted" && mv "$tmp/sorted" "$out"
}

# Who each process is, and what stands before its lines.
accepted run --no-agents --groups trainer=2,engine=1 -- \
    sh -c 'echo "$TENSORBUS_GROUP/$TENSORBUS_INDEX/$TENSORBUS_SIZE ${TENSORBUS_AGENT-none} $1" "${TENSORBUS_STORE%:*}"' x word
sorted
printf '%s\n' '[engine 0] engine/0/1 none word unix' '[trainer 0] trainer/0/2 none word unix' \
    '[trainer 1] trainer/1/2 none word unix' | cmp -s - "$out" || fail "seats: $(cat "$out")"

# A program for each group, without "--"; the last line has no end; standard error stays what it is.
run run --no-agents --store tcp://node:1 --groups a=1,b=1 sh -c 'printf "%s" "$TENSORBUS_STORE"' : \
    sh -c 'echo "is b" >&2'
expect_status 0 'two programs'
is_exactly '[a 0] tcp://node:1'
[ "$(cat "$err")" = '[b 0] is b' ] || fail "standard error: $(cat "$err")"

# The first failure counts, and ends the others, and what those have started.
begun=$(date +%s)
run run --no-agents --groups a=3 -- sh -c 'if [ "$TENSORBUS_INDEX" = 1 ]; then sleep 0.3; exit 7; fi
    sleep 987 & echo $! >>"$0"; wait' "$tmp/left"
expect_status 7 'a program that fails'
grep -q 'run: a 1 has ended with exit status 7; stopping the others' "$err" || fail "no sentence: $(cat "$err")"
[ $(($(date +%s) - begun)) -lt 60 ] || fail 'the others were not stopped'
run run --no-agents --groups a=1 -- sh -c 'sleep 986 & echo $! >>"$0"; kill -SEGV $$' "$tmp/left"
expect_status 139 'a program that is ended by a signal'
grep -q 'a 0 was ended by signal 11' "$err" || fail "no sentence: $(cat "$err")"
run run --no-agents --groups a=1 -- "$tmp/no/such/program"
expect_status 127 'a program that is not there'
grep -q "^\[a 0\] can't start .*/no/such/program: No such file" "$err" || fail "why is not said: $(cat "$err")"

# Agents are where `tensorbus status` finds them, and leave nothing behind, killed ones neither.
TB_STATUS="$TENSORBUS status --json" accepted run --groups a=2 -- sh -c '
    while [ "$TENSORBUS_INDEX" = 1 ]; do
        [ ! -e "$TMPDIR/found" ] || exit 0
        sleep 0.1
    done
    until [ "$($TB_STATUS 2>"$TMPDIR/why" | grep -o "\"index\":[01],\"size\":2" | sort -u | wc -l)" -eq 2 ]; do
        sleep 0.1
    done
    touch "$TMPDIR/found"'
[ -z "$(ls -A "$XDG_RUNTIME_DIR/tensorbus")" ] || fail "left behind: $(ls -A "$XDG_RUNTIME_DIR/tensorbus")"
run run --groups a=1 -- sh -c 'while [ ! -S "$TENSORBUS_AGENT" ]; do sleep 0.1; done
    for child in $(cat "/proc/$PPID/task/$PPID/children"); do
        tr "\0" " " <"/proc/$child/cmdline" | grep -q " agent " && kill -KILL "$child"
    done
    sleep 983'
expect_status 137 'an agent that is killed'
[ -z "$(ls -A "$XDG_RUNTIME_DIR/tensorbus")" ] || fail "left behind: $(ls -A "$XDG_RUNTIME_DIR/tensorbus")"

# So does an agent that fails, with its reason; and what was started ends with this command, however that ends.
run run --store "unix:$tmp/no/folder/store" --groups a=1 -- sleep 985
expect_status 1 'an agent that fails'
grep -q '^\[agent of a 0\] tensorbus agent: unix:.*/no/folder/store: the folder of this socket does not exist' "$err" || fail "the agent's reason: $(cat "$err")"
grep -q 'run: agent of a 0 has ended with exit status' "$err" || fail "the agent's end: $(cat "$err")"
"$TENSORBUS" run --groups a=1 -- sh -c 'echo $$ >"$0.new" && mv "$0.new" "$0" && exec sleep 984' "$tmp/program" \
    >"$out" 2>"$err" &
pid=$!
while [ ! -s "$tmp/program" ] && kill -0 "$pid"; do
    sleep 0.1
done
kill -KILL "$pid"
wait "$pid" 2>/dev/null
cat "$tmp/program" >>"$tmp/left"
# shellcheck disable=SC2013 # one number to a line
for pid in $(cat "$tmp/left"); do
    tries=0
    while grep -qs sleep "/proc/$pid/comm" && [ "$tries" -lt 100 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    [ "$tries" -lt 100 ] || fail "process $pid is left"
done

# Signals go to all programs, which may do what they like.
"$TENSORBUS" run --no-agents --groups a=2 -- \
    sh -c 'trap "echo one" USR1; trap "echo ends; exit 0" TERM; echo begun; while :; do sleep 0.1; done' >"$out" 2>"$err" &
pid=$!
for step in begun:USR1 one:TERM; do
    tries=0
    while [ "$(grep -c "${step%:*}" "$out")" -lt 2 ] && [ "$tries" -lt 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    kill -s "${step#*:}" "$pid"
done
wait "$pid"
status=$?
expect_status 0 'programs that end well at SIGTERM'
[ "$(grep -c '^\[a [01]\] ends$' "$out")" -eq 2 ] || fail "signals: $(cat "$out" "$err")"

# The end of the reader ends them.
(
    "$TENSORBUS" run --no-agents --groups a=1 -- sh -c 'while :; do echo line; sleep 0.01; done' 2>"$err"
    echo $? >"$tmp/status"
) | head -n 2 >"$out"
lines 2
[ "$(cat "$tmp/status")" -eq 141 ] || fail "without a reader: $(cat "$tmp/status")"
[ ! -s "$err" ] || fail "without a reader: $(cat "$err")"

# Programs that join as they are told, with agents and without, with a token and without.
example=$(dirname -- "$TENSORBUS")/examples/two_jobs
if [ -x "$example" ]; then
    echo 'a token of more than 32 bytes, which is enough' >"$tmp/token"
    for how in '' --no-agents "--token-file $tmp/token"; do
        # shellcheck disable=SC2086 # words
        accepted run $how --groups trainer=2,inference=2 -- "$example"
        [ "$(grep -c '^\[\(trainer\|inference\) [01]\] .* all right$' "$out")" -eq 4 ] ||
            fail "two_jobs with '$how': $(cat "$out")"
    done
fi

# The same, started by MPI.
for launcher in 'mpirun.openmpi --oversubscribe' mpirun.mpich; do
    if [ ! -x "$example" ] || ! command -v "${launcher%% *}" >/dev/null; then
        continue
    fi
    for group in trainer inference; do
        # shellcheck disable=SC2086 # words
        TENSORBUS_STORE=unix:$tmp/mpi TENSORBUS_GROUP=$group OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
            $launcher -n 2 "$example" >"$tmp/$group" 2>&1 </dev/null &
    done
    wait
    [ "$(cat "$tmp/trainer" "$tmp/inference" | grep -c '^[a-z]* [01]: .* all right$')" -eq 4 ] ||
        fail "two_jobs by $launcher: $(cat "$tmp/trainer" "$tmp/inference")"
done

refused '--groups is missing' run -- true
refused 'a program is missing' run --groups a=1
refused 'a program is missing' run --groups a=1 --
refused "'a' is not a group and how many" run --groups a -- true
refused "'a=0' is not a group and how many" run --groups a=0 -- true
refused "'b=2x' is not a group and how many" run --groups a=1,b=2x -- true
refused "'' is not a group and how many" run --groups a=1, -- true
refused "a group needs a name" run --groups =1 -- true
refused "group 'a' is there twice" run --groups a=1,a=2 -- true
refused '2 programs for 3 groups' run --groups a=1,b=2,c=1 -- true : false
refused "there is no program before a ':'" run --groups a=1 -- : true
refused "there is no program behind the last ':'" run --groups a=1 -- true :
refused '--token-file: .*No such file' run --groups a=1 --token-file "$tmp/none" -- true
refused "unknown option '--group'; did you mean '--groups'?" run --group a=1 -- true
finish
