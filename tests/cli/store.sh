#!/bin/sh
# tensorbus store: serves until it is told to end, and leaves nothing behind.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# serve ARG...: starts it; returns when it serves. Sets $pid.
serve() {
    : >"$out"
    "$TENSORBUS" store "$@" >"$out" 2>"$err" </dev/null &
    pid=$!
    tries=0
    while [ ! -s "$out" ] && kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    [ -s "$out" ] || fail "store $*: does not serve: $(cat "$err")"
}

# ended SIGNAL: it ends well when it gets the signal.
ended() {
    kill -s "$1" "$pid"
    wait "$pid"
    status=$?
    expect_status 0 "store after SIG$1"
    [ ! -s "$err" ] || fail "store: said $(cat "$err")"
}

for signal in TERM INT; do
    serve --listen "unix:$tmp/bus.sock"
    is_exactly "serving unix:$tmp/bus.sock"
    [ "$(stat -c %a "$tmp/bus.sock")" = 600 ] || fail "the socket is not for its user only"
    # another one has no place there, and does not disturb it
    cp "$out" "$tmp/first"
    run store --listen "unix:$tmp/bus.sock"
    expect_status 1 'a second store'
    grep -q '^tensorbus store: .*serve' "$err" || fail "a second store: $(cat "$err")"
    : >"$err"
    [ -S "$tmp/bus.sock" ] || fail "the second store has removed the socket"
    ended "$signal"
    [ ! -e "$tmp/bus.sock" ] || fail "the socket is left behind"
done

# a store that was killed is in nobody's way
serve --listen "unix:$tmp/bus.sock"
kill -s KILL "$pid"
wait "$pid" 2>/dev/null
serve --listen "unix:$tmp/bus.sock"
ended TERM

# one that waits says so, and takes the place of the first when that has ended; or ends itself when it is told to
serve --listen "unix:$tmp/bus.sock"
first=$pid
"$TENSORBUS" store --listen "unix:$tmp/bus.sock" --wait 600 >"$tmp/out2" 2>"$tmp/err2" </dev/null &
second=$!
"$TENSORBUS" store --listen "unix:$tmp/bus.sock" --wait 600 >"$tmp/out3" 2>"$tmp/err3" </dev/null &
third=$!
for file in err2 err3; do
    tries=0
    while [ ! -s "$tmp/$file" ] && [ "$tries" -lt 600 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    grep -q '^tensorbus store: .*another process serves it; waiting' "$tmp/$file" || fail "it does not say that it waits"
done
kill -s TERM "$third"
wait "$third"
status=$?
expect_status 0 'a store that waits, after SIGTERM'
{ [ -s "$tmp/out2" ] || [ -s "$tmp/out3" ]; } && fail 'it serves although another one does'
pid=$first
ended TERM
tries=0
while [ ! -s "$tmp/out2" ] && [ "$tries" -lt 600 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
[ "$(cat "$tmp/out2")" = "serving unix:$tmp/bus.sock" ] || fail "the one that waited does not serve: $(cat "$tmp/err2")"
run store --listen "unix:$tmp/bus.sock" --wait 1
expect_status 1 'a store that has waited in vain'
: >"$err"
pid=$second
ended TERM

printf 'open sesame, open sesame, open sesame\nnot this\n' >"$tmp/token"
serve --listen tcp://127.0.0.1:0 --token-file "$tmp/token"
printed '^serving tcp://127\.0\.0\.1:[1-9][0-9]*$'
ended TERM

# one that other machines reach has a token, or says that it has none
for url in tcp://0.0.0.0:0 'tcp://[::]:0'; do
    run store --listen "$url"
    expect_status 2 'a store without a token for other machines'
    grep -q 'needs a token: --token-file FILE, or --insecure' "$err" || fail "$url: $(cat "$err")"
    : >"$err"
done
serve --listen tcp://0.0.0.0:0 --insecure
ended TERM
serve --listen tcp://0.0.0.0:0 --token-file "$tmp/token"
ended TERM
serve --listen tcp://localhost:0
ended TERM

refused '--listen is missing' store
refused '--wait takes a number from 0 .* not .soon.' store --listen "unix:$tmp/s" --wait soon
refused "store 'etcd://h:1' is neither" store --listen etcd://h:1
refused "is neither" store --listen bus.sock
refused 'no port at its end' store --listen tcp://localhost
refused 'port 80000 is out of range: ports are 1 to 65535' store --listen tcp://0.0.0.0:80000
refused "'7000x' is not a port" store --listen tcp://localhost:7000x
refused '--token-file: can.t read .*/none: No such file' store --listen "unix:$tmp/s" --token-file "$tmp/none"
: >"$tmp/empty"
refused '--token-file: there is no token in the first line of .*/empty' store --listen "unix:$tmp/s" --token-file "$tmp/empty"
head -c 511 /dev/zero | tr '\0' x >"$tmp/long"
printf 'open\000sesame\n' >"$tmp/nul"
refused '--token-file: the token in .*/nul has a NUL byte; it must be text' \
    store --listen "unix:$tmp/s" --token-file "$tmp/nul"
refused '--token-file: .*/long: a token of 511 bytes; 510 are allowed' store --listen "unix:$tmp/s" --token-file "$tmp/long"
printf '%s\n' 0123456789012345678901234567890 >"$tmp/short"
refused '--token-file: .*/short: a token of 31 bytes; it must have at least 32' \
    store --listen "unix:$tmp/s" --token-file "$tmp/short"
refused '--insecure is for a store without a token' store --listen "unix:$tmp/s" --insecure --token-file "$tmp/token"
[ ! -e "$tmp/s" ] || fail "a socket although it failed"

finish
