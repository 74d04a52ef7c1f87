#!/bin/sh
# tensorbus doctor: every check is there; what is taken away is missed, with a remedy.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# failed PATTERN ARG...: exit status 1, a table, and a sentence that matches PATTERN.
failed() {
    pattern=$1
    shift
    run "$@"
    expect_status 1 "$*"
    grep -q -e "$pattern" "$err" || fail "$*: expected '$pattern': $(cat "$err")"
    [ -s "$out" ] || fail "$*: nothing is printed"
}

unset UCX_TLS UCX_NET_DEVICES
accepted doctor
printed '^ok  *transport self  *opens'
printed '^ok  *transport shm  *opens'
for what in ucx mpi 'host id' process_vm tb_alloc 'huge pages' /dev/shm 'locked memory' descriptors cores AVX2 etcd HTTP; do
    printed "^[a-z]*  *$what  "
done
printed '^ok  *tb_alloc'
not_printed '^[a-z]*  *store  '
not_printed '^failed'

accepted doctor --json
python3 - "$out" <<'PYTHON' || fail "the JSON is not what it should be"
import json, sys
findings = json.load(open(sys.argv[1]))
assert len(findings) >= 15
for f in findings:
    assert set(f) in ({"name", "state", "found"}, {"name", "state", "found", "remedy"}), f
    assert f["state"] in ("ok", "limited", "failed") and f["found"], f
    assert f["state"] == "ok" or "remedy" in f, f
PYTHON

# what is taken away
(
    ulimit -f 100
    "$TENSORBUS" doctor
) >"$out" 2>"$err"
status=$?
expect_status 1 'doctor with small files only'
printed '^failed  *tb_alloc  '
printed '^  *-> raise RLIMIT_FSIZE'
grep -q '^tensorbus doctor: essential, and not well: .*tb_alloc$' "$err" || fail "small files: $(cat "$err")"

(
    # shellcheck disable=SC3045 # all shells have it
    ulimit -n 100
    "$TENSORBUS" doctor
) >"$out" 2>"$err"
status=$?
expect_status 0 'doctor with few descriptors'
printed '^limited  *descriptors  *100 for a program, 100 for an agent$'
printed '^  *-> raise RLIMIT_NOFILE'

mkdir "$tmp/lib"
: >"$tmp/lib/libcurl.so.4"
: >"$tmp/lib/libucp.so.0"
: >"$tmp/lib/libmpi.so.40"
: >"$tmp/lib/libmpich.so.12"
LD_LIBRARY_PATH=$tmp/lib accepted doctor
printed '^limited  *etcd  *etcd is reached through libcurl, which can.t be loaded'
printed '^limited  *ucx  *libucp.so.0 is not there'
printed '^limited  *mpi  *neither Open MPI nor MPICH'
printed '^limited  *transport ucx  *transport ucx needs OpenUCX'
printed '^  *-> see ucx, below; without it '
printed '^  *-> apt-get install libucx0$'
printed '^  *-> apt-get install openmpi-bin, or mpich'

# settings of UCX that leave it without a lane, or without one that leads anywhere
UCX_NET_DEVICES=nowhere0 UCX_TLS=tcp accepted doctor
if grep -q '^limited  *transport ucx  *ucx: opening it' "$out"; then
    printed '^ok  *ucx  .*; UCX_NET_DEVICES=nowhere0'
else
    printed '^limited  *ucx  *libucp.so.0 is not there'
fi

# a store
printf 'open sesame\n' >"$tmp/token"
printf 'open barley\n' >"$tmp/wrong"
: >"$tmp/url"
"$TENSORBUS" store --listen tcp://127.0.0.1:0 --token-file "$tmp/token" >"$tmp/url" 2>&1 </dev/null &
store=$!
tries=0
while [ ! -s "$tmp/url" ] && [ "$tries" -lt 600 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
url=$(sed -n 's/^serving //p' "$tmp/url")
accepted doctor --store "$url" --token-file "$tmp/token"
printed '^ok  *store  *tcp://127\.0\.0\.1:[0-9]* answers; processes of other hosts can.t reach it$'
failed 'essential, and not well: store$' doctor --store "$url" --token-file "$tmp/wrong"
printed '^failed  *store  .*token'
printed '^  *-> give the store.s token'
kill "$store"
wait "$store"
failed 'essential, and not well: store$' doctor --store "$url" --token-file "$tmp/token"
printed '^failed  *store  '
printed '^  *-> start it'
failed 'essential, and not well: store$' doctor --store "unix:$tmp/none" --json
printed '"name":"store","state":"failed","found":"[^"]*","remedy":"start it'

refused "no store is known for 'nowhere'" doctor --store nowhere
refused 'there is no token' doctor --store "$url" --token-file /dev/null
refused '--token-file is for --store' doctor --token-file "$tmp/token"

finish
