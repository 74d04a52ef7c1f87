#!/bin/sh
# tensorbus bench --between: two shells with one store, on one machine and on two hosts; both print the same lines.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"
PATH=$PATH:/usr/sbin:/sbin

# wait_for TEXT: it is in what the store tells of the bus.
wait_for() {
    tries=0
    until "$TENSORBUS" status --store "unix:$tmp/store" --json 2>/dev/null | grep -q -e "$1" || [ "$tries" -ge 300 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
}

# both OPTION...: the first of two shells has these options, the second only the store.
both() {
    "$TENSORBUS" bench --between --store "unix:$tmp/store" --json "$@" >"$tmp/first" 2>"$tmp/first.err" </dev/null &
    job=$!
    wait_for bench-first # has its seat
    run bench --between --store "unix:$tmp/store" --json
    wait "$job"
    first=$?
}

both --size 2MiB --rounds 2
expect_status 0 'the second shell'
[ "$first" -eq 0 ] || fail "the first shell: $first, $(cat "$tmp/first.err")"
transports=shm
"$TENSORBUS" doctor | grep -q '^ok  *transport ucx ' && transports='shm ucx'
for transport in $transports; do
    for line in bandwidth row_col model; do
        printed "^{\"name\":\"${transport}_$line\",.*\"gb_per_s\":[0-9.]*,\"ratio\":[0-9.]*,\"against\":\"a plain socket\",.*\"rounds\":2"
    done
    printed "^{\"name\":\"${transport}_latency\",.*\"us\":[0-9.]*,"
done
not_printed '"gb_per_s":0\.000'
cmp -s "$out" "$tmp/first" || fail "the shells print different lines: $(diff "$out" "$tmp/first")"

both --size 2MiB --rounds 1 --only shm_row_col
lines 1
printed '"rounds":1'

refused '--between needs --store' bench --between
refused '--store goes with --between' bench --store unix:/tmp/x
refused "'row_col' is measured without" bench --between --store unix:/tmp/x --only row_col
refused "'ucx_model' is measured with --between" bench --only ucx_model
refused '--between does not go with --gpu' bench --between --store unix:/tmp/x --gpu

# one is ended: so is the other
"$TENSORBUS" bench --between --store "unix:$tmp/store" --rounds 1000 --only shm_bandwidth >"$tmp/first" 2>&1 </dev/null &
job=$!
"$TENSORBUS" bench --between --store "unix:$tmp/store" --rounds 1000 --only shm_bandwidth >"$tmp/second" 2>&1 </dev/null &
other=$!
wait_for '"name":"tensors"' # they are past connecting, in which a lost peer is waited for
kill -TERM "$job"
wait "$job"
status=$?
expect_status 143 'a shell that is ended'
wait "$other"
status=$?
[ "$status" -eq 1 ] || [ "$status" -eq 2 ] || fail "the other shell: $status, $(cat "$tmp/second")"

# two hosts
if [ "$(id -u)" -eq 0 ] && [ "$transports" != shm ]; then
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$tmp/token"
    cat >"$tmp/hosts.sh" <<'END'
cd "$2" || exit 1
UCX_TLS=tcp
export UCX_TLS
start() {
    "$BED" exec "$1" "$TENSORBUS" bench --between --store "tcp://$BED_ADDR_0:7000" --token-file token --size 2MiB \
        --rounds 1 --json >"host.$1" 2>"host.$1.err"
}
start 0 &
tries=0 # only host 0 can serve the store
until "$BED" exec 1 "$TENSORBUS" status --store "tcp://$BED_ADDR_0:7000" --token-file token 2>/dev/null |
    grep -q bench-first || [ "$tries" -ge 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
start 1
status=$?
wait
exit $status
END
    bed=$(dirname -- "$0")/../hosts/bed
    timeout 120 "$bed" 2 -- sh "$tmp/hosts.sh" hosts "$tmp" >"$tmp/bed.log" 2>&1
    status=$?
    if [ "$status" -ne 77 ]; then
        expect_status 0 "two hosts: $(cat "$tmp/bed.log" "$tmp"/host.*.err)"
        cp "$tmp/host.0" "$out"
        lines 4
        printed '^{"name":"ucx_model",'
        not_printed '"name":"shm_'
        cmp -s "$tmp/host.0" "$tmp/host.1" || fail 'two hosts print different lines'
    fi
fi

finish
