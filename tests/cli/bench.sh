#!/bin/sh
# tensorbus bench: every line is there, and verified; ratios are left alone, because tests share the machine.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# Nothing it leaves behind goes unnoticed.
TMPDIR=$(mktemp -d /tmp/tb.XXXXXX) || exit 1
export TMPDIR
trap 'rm -rf "$tmp" "$TMPDIR"' EXIT

nothing_is_left() {
    [ -z "$(ls -A "$TMPDIR")" ] || fail "$1: left $(ls -A "$TMPDIR")"
}

accepted bench --size 2MiB --rounds 1 --json
lines 9
for name in row_col row_col_hand foreign model replicate local small cast partial; do
    printed "^{\"name\":\"$name\",.*\"gb_per_s\":[0-9.]*,\"ratio\":[0-9.]*,\"against\":\".*,\"rounds\":1,\"at_least\":0"
done
not_printed '"gb_per_s":0\.000'
nothing_is_left bench

# a size that nothing divides evenly, and an even number of rounds
accepted bench --size 3500001 --rounds 2 --only small,row_col
lines 3
printed '^row_col  .* memcpy  .*0\.85  '
printed '^small  .*0\.60  '

# without MPI and Python
mkdir "$tmp/bin" || exit 1
tool=$(command -v "$TENSORBUS") || exit 1
PATH=$tmp/bin "$tool" bench --size 1MiB --rounds 1 --only row_col --peers >"$out" 2>"$err" </dev/null
status=$?
expect_status 0 'peers that are not there'
printed '^row_col_mpi: not measured: .*install openmpi-bin libopenmpi-dev$'
printed '^row_col_gloo: not measured: .*install torch$'

# --check: either way, the status says what the table says
run bench --size 1MiB --rounds 1 --only row_col --check
if grep -q below "$out"; then
    expect_status 1 'below, with --check'
    grep -q '^tensorbus bench: 1 of 1 ratios are below their marks$' "$err" || fail "--check: said $(cat "$err")"
else
    expect_status 0 'reached, with --check'
fi

# a signal: it takes ranks and files along
"$TENSORBUS" bench --size 64MiB --rounds 1000 --only row_col >"$out" 2>"$err" </dev/null &
pid=$!
tries=0
until [ -n "$(ls -A "$TMPDIR")" ] || [ $tries -ge 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
[ $tries -lt 300 ] || fail 'no folder was made'
kill -TERM $pid
wait $pid
status=$?
expect_status 143 'ended by SIGTERM'
[ ! -s "$out" ] || fail 'printed something although it was ended'
nothing_is_left SIGTERM

finish
