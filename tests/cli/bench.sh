#!/bin/sh
# tensorbus bench: every line is there, and verified; ratios are left alone, because tests share the machine.
# shellcheck source=tests/cli/ranks.sh
. "$(dirname -- "$0")/ranks.sh"

accepted bench --size 2MiB --rounds 1 --json
lines 19
for name in row_col_hand foreign model replicate local small cast partial refit reshard_disk reshard_vllm reshard_fp8 \
    quant_mxfp8 first bus_model; do
    printed "^{\"name\":\"$name\",.*\"gb_per_s\":[0-9.]*,\"ratio\":[0-9.]*,\"against\":\".*,\"rounds\":1,\"at_least\":0"
done
for name in limit row_col row_col_hand foreign model replicate local small tiny cast partial refit quant_mxfp8 \
    first bus_model; do
    printed "^{\"name\":\"$name\",.*,\"of_limit\":[0-9.]*"
done
printed '^{"name":"limit","work":"the best copy: [a-z0-9 -]*, [0-9]* threads*[a-z ,]*",.*"against":"memcpy"'
printed '^{"name":"row_col",.*,"at_least_of_limit":0.90,"ok":'
not_printed '"gb_per_s":0\.000'
printed '^{"name":"command_rtt",.*"us":[0-9.]*,"ratio":[0-9.]*,"against":".*,"against_us":[0-9.]*,"rounds":1,"at_most":1\.30,"ok":'
not_printed '"us":0\.000'
clean bench

# a size that nothing divides evenly, and an even number of rounds
accepted bench --size 3500001 --rounds 2 --only small,row_col
lines 3
printed '^row_col  .* memcpy  .*  0\.90 of limit  '
printed '^small  .*  at least 0\.75  '

# the path between machines takes memory beside the tensors, and no more than the settings allow
extra_bytes() {
    sed -n 's/.*"extra_bytes":\([0-9]*\).*/\1/p' "$out"
}
accepted bench --size 32MiB --rounds 1 --only row_col --json
direct=$(extra_bytes)
accepted bench --size 32MiB --rounds 1 --only row_col --staged --json
staged=$(extra_bytes)
TENSORBUS_BUCKET_SIZE=256k TENSORBUS_STAGING_BYTES=1MiB accepted bench --size 32MiB --rounds 1 --only row_col --staged --json
little=$(extra_bytes)
if [ -n "${SANITIZED-}" ]; then
    printf 'not tested under a sanitizer, which has memory of its own: extra memory\n'
elif [ -n "$direct" ]; then
    [ "$staged" -gt $((direct + (16 << 20))) ] || fail "staged: $staged bytes of extra memory, $direct otherwise"
    [ "$little" -lt $((direct + (16 << 20))) ] || fail "TENSORBUS_STAGING_BYTES=1MiB: $little bytes of extra memory"
else
    printf 'not tested where the kernel does not tell PSS: extra memory\n'
fi
accepted bench --size 1MiB --rounds 1 --staged --json
lines 19

# without MPI and Python
mkdir "$tmp/bin" || exit 1
tool=$(command -v "$TENSORBUS") || exit 1
PATH=$tmp/bin "$tool" bench --size 1MiB --rounds 1 --only row_col,tiny --peers >"$out" 2>"$err" </dev/null
status=$?
expect_status 0 'peers that are not there'
printed '^row_col_mpi: not measured: .*install openmpi-bin libopenmpi-dev$'
printed '^row_col_gloo: not measured: .*install torch$'
printed '^tiny_torch: not measured: .*install torch$'

# --check: either way, the status says what the table says
# checked LINE
checked() {
    run bench --size 1MiB --rounds 1 --only "$1" --check
    if grep -q '  missed' "$out"; then
        expect_status 1 "$1: missed, with --check"
        grep -q '^tensorbus bench: 1 of 1 ratios miss their marks$' "$err" || fail "--check: said $(cat "$err")"
    else
        expect_status 0 "$1: reached, with --check"
    fi
}
checked row_col
checked command_rtt
printed '^command_rtt  .* us  .* us  .*  at most 1\.30  '

# whatever ends it: it takes ranks and files along
begin() {
    start bench --size 16MiB --rounds 1000 --only row_col
    hold || fail "it was not caught at work: $(cat "$err")"
}

begin
kill -TERM "$job"
ended 143 '^tensorbus bench: ended by signal 15 (Terminated)$' 'SIGTERM to the bench'

begin
kill -INT "-$job"
ended 130 '^tensorbus bench: ended by signal 2 (Interrupt)$' 'SIGINT to the group'

# a line that fails: the others are measured
start bench --size 16MiB --rounds 300 --only row_col,quant_mxfp8
hold || fail "it was not caught at work: $(cat "$err")"
kill -KILL "$(ranks | sed -n 6p)"
wait "$job" 2>/dev/null
status=$?
expect_status 1 'SIGKILL to a rank'
printed '^row_col: failed: to 1 was ended by signal 9 (Killed)$'
printed '^quant_mxfp8  '
lines 3
[ "$(cat "$err")" = 'tensorbus bench: row_col: to 1 was ended by signal 9 (Killed)' ] ||
    fail "SIGKILL to a rank: said $(cat "$err")"
[ -z "$(in_session "$job")" ] || fail "SIGKILL to a rank: left processes behind: $(in_session "$job")"
clean 'SIGKILL to a rank'

# on a terminal it is told once: standard output and standard error are the same there
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    TENSORBUS_STAGING_BYTES=1 TERM=dumb script -qec "'$TENSORBUS' bench --size 1MiB --rounds 1 --only row_col" \
        /dev/null >"$out" 2>"$err" </dev/null
    [ "$(grep -c 'staging_bytes' "$out")" -eq 1 ] || fail "a line that fails, on a terminal: $(cat "$out")"
else
    printf 'not tested without script and terminals: a line that fails\n'
fi

# a line is there as soon as it is measured, whatever ends the command afterwards
setsid env --default-signal=INT "$TENSORBUS" bench --size 4MiB --rounds 1000 --only quant_mxfp8,bus_model --json \
    >"$out" 2>"$err" </dev/null &
job=$!
while is_running && [ ! -s "$out" ]; do
    sleep 0.01
done
kill -INT "$job" 2>/dev/null
wait "$job" 2>/dev/null
status=$?
expect_status 130 'SIGINT after the first line'
lines 1
printed '^{"name":"quant_mxfp8",.*"rounds":1000,'
clean 'SIGINT after the first line'

# what a run that was killed leaves in TMPDIR goes with the next run, whatever that measures
setsid "$TENSORBUS" bench --size 64MiB --rounds 1 --only row_col >"$out" 2>"$err" </dev/null &
job=$!
while is_running && [ -z "$(ls "$TMPDIR"/*/in_use.lock 2>/dev/null)" ]; do
    sleep 0.01
done
kill -KILL "-$job"
wait "$job" 2>/dev/null
nothing_left || fail 'SIGKILL to all of the bench: processes are left'
run bench --size 1MiB --rounds 1 --only quant_mxfp8
expect_status 0 'after one that was killed'
clean 'after one that was killed'

# gigabytes do so; what another run works with stays, and so does what is not known
mkdir "$TMPDIR/tensorbus-killed" "$TMPDIR/tensorbus-inuse1" "$TMPDIR/tensorbus-other1"
for folder in killed inuse1; do
    mkdir "$TMPDIR/tensorbus-$folder/in"
    : >"$TMPDIR/tensorbus-$folder/in_use.lock"
done
if command -v flock >/dev/null; then
    mkfifo "$tmp/locked" "$tmp/enough"
    # shellcheck disable=SC2016 # the inner shell expands these
    flock -x "$TMPDIR/tensorbus-inuse1/in_use.lock" \
        sh -c 'echo >"$1"; read -r line <"$2"' - "$tmp/locked" "$tmp/enough" &
    holder=$!
    read -r _ <"$tmp/locked"
    run bench --size 1MiB --rounds 1 --only reshard_disk
    expect_status 0 'with leftovers'
    grep -q '^tensorbus bench: removing .*/tensorbus-killed, which a run that was killed left$' "$err" ||
        fail "leftovers: said $(cat "$err")"
    [ "$(cd "$TMPDIR" && echo *)" = 'tensorbus-inuse1 tensorbus-other1' ] || fail "leftovers: $(ls "$TMPDIR")"
    echo >"$tmp/enough"
    wait "$holder"
else
    printf 'not tested: leftovers, since there is no flock\n'
fi
rm -r "${TMPDIR:?}"/*

# nobody who reads it
if [ -w /dev/full ]; then
    "$TENSORBUS" bench --size 1MiB --rounds 1 --only quant_mxfp8,row_col >/dev/full 2>"$err" </dev/null
    status=$?
    expect_status 1 'output to a full device'
    [ "$(wc -l <"$err")" -eq 1 ] || fail "output to a full device: said $(cat "$err")"
fi

# agents go with it, too
start bench --size 16MiB --rounds 1000 --only bus_model
hold || fail "it was not caught at work: $(cat "$err")"
kill -TERM "$job"
ended 143 '^tensorbus bench: ended by signal 15 (Terminated)$' 'SIGTERM to the bench with agents'

finish
