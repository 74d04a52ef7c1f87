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
for what in 'transport ucx' mpi 'host id' process_vm tb_alloc 'huge pages' /dev/shm 'locked memory' descriptors cores 'vector instructions' 'large copies' etcd HTTP; do
    printed "^[a-z]*  *$what  "
done
printed '^ok  *tb_alloc'
printed '^ok  *large copies  *[a-z0-9-]*, by '
not_printed '^[a-z]*  *store  '
not_printed '^failed'
cp "$out" "$tmp/usual"

accepted doctor --json
python3 - "$out" <<'PYTHON' || fail "the JSON is not what it should be"
import json, sys
findings = json.load(open(sys.argv[1]))
assert len(findings) >= 14
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

if unshare -m mount -t tmpfs -o ro none /dev/shm 2>/dev/null; then # that takes root
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare -m sh -c 'mount -t tmpfs -o ro none /dev/shm && exec "$0" doctor' "$TENSORBUS" >"$out" 2>"$err"
    status=$?
    expect_status 0 'doctor where /dev/shm may not be written to'
    printed '^limited  */dev/shm  .*: Read-only file system$'
    printed '^  *-> mount a tmpfs there that may be written to$'
fi

(
    # shellcheck disable=SC3045 # all shells have it
    ulimit -n 100
    "$TENSORBUS" doctor
) >"$out" 2>"$err"
status=$?
expect_status 0 'doctor with few descriptors'
not_printed '^failed'
printed '^limited  *descriptors  *100 for a program, 100 for an agent$'
printed '^  *-> raise RLIMIT_NOFILE'

# with hardly any, nothing else would be told as it is
(
    # shellcheck disable=SC3045 # all shells have it
    ulimit -n 12
    "$TENSORBUS" doctor
) >"$out" 2>"$err"
status=$?
expect_status 1 'doctor with hardly any descriptors'
printed '^failed  *descriptors  *12 for a program'
printed '^  *-> raise RLIMIT_NOFILE'
lines 3

mkdir "$tmp/lib"
: >"$tmp/lib/libcurl.so.4"
: >"$tmp/lib/libucp.so.0"
: >"$tmp/lib/libmpi.so.40"
: >"$tmp/lib/libmpich.so.12"
LD_LIBRARY_PATH=$tmp/lib accepted doctor
printed '^limited  *etcd  *etcd is reached through libcurl, which can.t be loaded'
printed '^limited  *mpi  *no MPI that it was built with'
printed '^limited  *transport ucx  *transport ucx needs OpenUCX'
printed '^  *-> apt-get install libucx0; without it '
case $MPIS in
*openmpi*) printed '^  *-> apt-get install openmpi-bin, ' ;;
*mpich*) printed '^  *-> apt-get install mpich, ' ;;
*) printed '^  *-> build tensorbus again' ;;
esac

# An MPI that is there is of use only where tensorbus was built with it.
printf 'int nothing;\n' >"$tmp/empty.c"
if command -v cc >/dev/null; then
    for library in libmpi.so.40 libmpich.so.12; do
        cc -shared -o "$tmp/lib/$library" "$tmp/empty.c" || fail "no $library"
    done
    LD_LIBRARY_PATH=$tmp/lib accepted doctor
    for mpi in openmpi:libmpi.so.40 mpich:libmpich.so.12; do
        case $MPIS in
        *"${mpi%:*}"*) printed "^ok  *mpi  .*(${mpi#*:})" ;;
        *) printed "^[a-z]*  *mpi  .*built without .*(${mpi#*:})\|^limited  *mpi  .*(${mpi#*:}).*built without" ;;
        esac
    done
fi

# UCX, where it is: too old, without a lane, or without one that leads to other hosts
if grep -q '^ok  *transport ucx ' "$tmp/usual"; then
    if command -v cc >/dev/null; then
        cat >"$tmp/old.c" <<'C'
const char *ucp_get_version_string(void);
const char *ucp_get_version_string(void) {
    return "1.12.1";
}
C
        rm "$tmp/lib/libucp.so.0"
        cc -shared -fPIC -o "$tmp/lib/libucp.so.0" "$tmp/old.c" || fail 'no old UCX'
        LD_LIBRARY_PATH=$tmp/lib accepted doctor
        printed '^limited  *transport ucx  *transport ucx needs OpenUCX 1.13 or later.*; UCX 1.12.1'
        printed '^  *-> install a later one'
    fi
    UCX_NET_DEVICES=nowhere0 UCX_TLS=tcp accepted doctor
    printed '^limited  *transport ucx  *opening UCX: .*(UCX_NET_DEVICES=nowhere0, UCX_TLS=tcp); UCX [0-9.]*, /.*/libucp.so.0[0-9.]*$'
    printed '^  *-> change the variables, or unset them'
    for lanes in self self,shm; do
        UCX_TLS=$lanes accepted doctor
        printed "^limited  *transport ucx  *opens, but has no lane to other hosts: self/.*; UCX_TLS=$lanes\$"
        printed '^  *-> let the variables allow tcp'
    done
    UCX_NET_DEVICES=lo accepted doctor
    printed '^limited  *transport ucx  *opens, but has no lane to other hosts: .*tcp/lo'
fi

# a store
printf 'open sesame, open sesame, open sesame\n' >"$tmp/token"
printf 'open barley, open barley, open barley\n' >"$tmp/wrong"
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

# Whoever listens there is no store: silent, or with another protocol.
cat >"$tmp/listen.py" <<'PYTHON'
import http.server, socket, sys
if sys.argv[1] == "http":
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
else:
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
PYTHON
mkfifo "$tmp/hold"
for kind in http silent; do
    : >"$tmp/port"
    python3 -B "$tmp/listen.py" "$kind" >"$tmp/port" 2>/dev/null <"$tmp/hold" &
    listener=$!
    exec 3>"$tmp/hold"
    tries=0
    while [ ! -s "$tmp/port" ] && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    failed 'essential, and not well: store$' doctor --store "tcp://127.0.0.1:$(cat "$tmp/port")"
    printed "^  *-> give the store's own port: what listens there "
    exec 3>&-
    kill "$listener" 2>/dev/null
    wait "$listener"
done
failed 'essential, and not well: store$' doctor --store tcp://nobody.invalid:7000
printed "^failed  *store  .*the name 'nobody.invalid'"
printed '^  *-> let the name be found here'

# Another user's socket does not take a token.
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
    mkdir "$tmp/theirs"
    chmod 755 "$tmp"
    chown 65534:65534 "$tmp/theirs"
    : >"$tmp/url"
    setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$TENSORBUS" store --listen "unix:$tmp/theirs/s" >"$tmp/url" 2>&1 </dev/null &
    theirs=$!
    tries=0
    while [ ! -s "$tmp/url" ] && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    if grep -q '^serving' "$tmp/url"; then
        failed 'essential, and not well: store$' doctor --store "unix:$tmp/theirs/s"
        printed '^failed  *store  .*served by user 65534'
        printed '^  *-> run this as the user who serves it'
        kill "$theirs"
    else
        printf 'not tested, another user can not run the tool: %s\n' "$(cat "$tmp/url")"
    fi
    wait "$theirs"
fi

failed 'essential, and not well: store$' doctor --store "$url" --token-file "$tmp/token"
printed '^failed  *store  '
printed '^  *-> start it'
failed 'essential, and not well: store$' doctor --store "unix:$tmp/none" --json
printed '"name":"store","state":"failed","found":"[^"]*","remedy":"start it'

refused "no store is known for 'nowhere'" doctor --store nowhere
refused 'there is no token' doctor --store "$url" --token-file /dev/null
refused '--token-file is for --store' doctor --token-file "$tmp/token"

finish
