#!/bin/sh
# tensorbus demo: a model arrives, every element of it; whatever ends the demo leaves nothing behind.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

TMPDIR=$tmp/t
export TMPDIR
mkdir "$TMPDIR" || exit 1

# clean WHAT: the demo has removed its folder
clean() {
    [ -z "$(ls -A "$TMPDIR")" ] || fail "$1: left $(ls -A "$TMPDIR") behind"
}

# moved ELEMENTS RANKS ARG...: the demo must verify this many elements on so many target ranks
moved() {
    elements=$1
    ranks=$2
    shift 2
    accepted demo "$@"
    printed "^verified  all $elements elements on $ranks, in each of 3 versions\$"
    for version in 1 2 3; do
        printed "^ *$version  *[0-9.]* [KMG]iB  *[0-9.]*  *[0-9.]*  *[0-9]*%  "
    done
    clean "$*"
}

# twice the model's 16777536 elements, and the 65 norms of 192 twice more, because they are on every rank
moved 33580032 '4 ranks' --size 32MiB
printed '^model     291 bf16 tensors, 32 layers, hidden size 192, 32.0 MiB (33555072 bytes)$'
printed '^source    4 processes; mesh=4 place=Shard(0)$'
printed '^target    4 processes; mesh=2,2 place=Replicate,Shard(0); o_proj, down_proj mesh=2,2 place=Replicate,Shard(1); norms replicated$'
printed '^version  delivered  *ms  *GB/s  of memcpy  plan  wait  pack  wire  unpack  commit$'
printed '^memcpy    [0-9.]* GB/s by [0-9]* threads\{0,1\}$'
lines 11

# other numbers of ranks
moved '[0-9]*' '1 rank' --size 1MiB --ranks 1
printed '^source    1 process; mesh=1 place=Shard(0)$'
moved '[0-9]*' '3 ranks' --size 1MiB --ranks 2,3
printed '^target    3 processes; mesh=1,3 place=Replicate,Shard(0);'
moved '[0-9]*' '6 ranks' --size 1MiB --ranks 5,6
printed '^target    6 processes; mesh=2,3 place=Replicate,Shard(0);'

# other layouts: the elements are those of the model, as often as there are copies
accepted demo --size 100k --ranks 1
once=$(sed -n 's/^verified  all \([0-9]*\) .*/\1/p' "$out")
moved "$once" '4 ranks' --size 100k --src 'mesh=3 place=Shard(0)' --dst 'mesh=4 place=Shard(0)'
moved "$once" '3 ranks' --size 100k --src 'mesh=4 place=StridedShard(0,2)' --dst 'mesh=3 place=Shard(0) ranks=2,0,1'
moved $((once * 2)) '2 ranks' --size 100k --src 'mesh=2,2 place=Shard(0),Shard(0)' --dst 'mesh=2 place=Replicate'
moved '[0-9]*' '4 ranks' --size 100k --src 'mesh=2,2 place=Shard(0),Shard(1)' --dst 'mesh=4 place=Shard(1)'
printed '^source    4 processes; mesh=2,2 place=Shard(0),Shard(1); norms replicated$'
printed '^target    4 processes; mesh=4 place=Shard(1); norms replicated$'
moved "$once" '5 ranks' --size 100k --ranks 3,5 --src 'mesh=2 place=Shard(0)' --dst 'mesh=2 place=Shard(0) ranks=4,1'

# settings take part
TENSORBUS_BUCKET_SIZE=1000 TENSORBUS_STAGING_BYTES=64k moved "$once" '1 rank' --size 100k --ranks 4,1

refused "^tensorbus demo: --size: 'lots' is not a size" demo --size lots
refused '^tensorbus demo: --size: a model of 1000 bytes is too small; it must have at least 65536$' demo --size 1000
refused '^tensorbus demo: the ranks would hold .* but only .* of memory are free$' demo --size 1000TiB
for ranks in 0 -1 65 4,0 4,65 4,4,4 '4,' ,4 four 4x ''; do
    refused "^tensorbus demo: --ranks: '$ranks' is not N or N,M, each between 1 and 64\$" demo --ranks "$ranks"
done
refused '^tensorbus demo: --src: .*mesh= and place=' demo --src 'mesh=4'
refused '^tensorbus demo: --dst: rank 3 is in the mesh, but the ranks of this side are 0 to 2$' \
    demo --ranks 3 --dst 'mesh=4 place=S0'
refused '^tensorbus demo: --src: rank 99 is in the mesh' demo --src 'mesh=1 place=S0 ranks=99'
refused '^tensorbus demo: --src: Partial is not for the demo' demo --src 'mesh=4 place=P'
refused '^tensorbus demo: .*weight: dst: mesh dim 0 shards dim 2 of a tensor that has 2 dims' demo --dst 'mesh=4 place=S2'
refused '^tensorbus demo: .*weight: .*held by no source' demo --src 'mesh=1 place=Explicit(0, 0-3)'
TMPDIR=$tmp/none run demo --size 1MiB
expect_status 1 'demo without a TMPDIR'
grep -q "^tensorbus demo: can't make a folder $tmp/none/.*: No such file" "$err" || fail "no TMPDIR: $(cat "$err")"
clean 'bad input'

# On a terminal there is a moving line, which is gone in the end.
if command -v script >/dev/null; then
    TERM=xterm script -qec "'$TENSORBUS' demo --size 1MiB" /dev/null >"$out" 2>"$err" </dev/null || fail "on a terminal"
    printed 'version 1 of 3  filling '
    tr '\r' '\n' <"$out" | grep -q 'verified  all [0-9]* elements' || fail "on a terminal: $(cat "$out")"
    tr '\r' '\n' <"$out" | sed -n '/^.\[Kmodel /p' | grep -q . || fail "the moving line was not cleared: $(cat "$out")"
else
    printf 'not tested without script: the moving line\n'
fi

# in_session PID: what is alive in the session that PID has begun, as "pid parent" lines
in_session() {
    cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^\([0-9]*\) (.*) \([A-Za-z]\) /\1 \2 /' |
        awk -v session="$1" '$5 == session && $2 != "Z" && $2 != "X" { print $1, $3 }'
}

# ranks: the processes that the demo has forked, oldest first
ranks() {
    in_session "$demo" | awk -v parent="$demo" '$2 == parent { print $1 }' | sort -n
}

# is_running: the demo has not ended, as one has that only waits to be waited for
is_running() {
    case $(sed 's/.*) //' "/proc/$demo/stat" 2>/dev/null) in
    '' | Z* | X*) return 1 ;;
    esac
}

# nothing_left: waits until the session is empty, for a minute at most
nothing_left() {
    tries=0
    while [ -n "$(in_session "$demo")" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 1200 ] || return 1
        sleep 0.05
    done
}

# begin: starts a demo in a session of its own, where the shell would have it ignore SIGINT, and stops its first rank, so
# that it can't come to its end. One that was faster is followed by a larger one.
begin() {
    for size in 128MiB 512MiB 2GiB; do
        setsid env --default-signal=INT "$TENSORBUS" demo --size "$size" >"$out" 2>"$err" </dev/null &
        demo=$!
        while is_running && [ "$(ranks | wc -l)" -lt 8 ]; do
            sleep 0.01
        done
        first=$(ranks | head -n 1)
        if [ -n "$first" ] && kill -STOP "$first" 2>/dev/null; then
            [ "$(ranks | wc -l)" -lt 8 ] || return 0
            kill -CONT "$first"
        fi
        wait "$demo" || fail "a demo of $size failed: $(cat "$err")"
    done
    fail "no demo was caught at work"
}

# ended STATUS PATTERN WHAT: it must end with this status, one sentence, and without a trace
ended() {
    wait "$demo" 2>/dev/null
    status=$?
    expect_status "$1" "$3"
    [ ! -s "$out" ] || fail "$3: printed something although it was ended"
    [ "$(wc -l <"$err")" -eq 1 ] || fail "$3: said $(wc -l <"$err") lines instead of one: $(cat "$err")"
    grep -q -e "$2" "$err" || fail "$3: expected '$2': $(cat "$err")"
    [ -z "$(in_session "$demo")" ] || fail "$3: left processes behind: $(in_session "$demo")"
    clean "$3"
}

begin
kill -INT "$demo"
ended 130 '^tensorbus demo: ended by signal 2 (Interrupt)$' 'SIGINT to the demo'

begin
kill -INT "-$demo"
ended 130 '^tensorbus demo: ended by signal 2 (Interrupt)$' 'SIGINT to the group'

begin
kill -TERM "-$demo"
ended 143 '^tensorbus demo: ended by signal 15 (Terminated)$' 'SIGTERM to the group'

# a rank of each side, while others wait for them
for nth in 2 7; do
    begin
    kill -KILL "$(ranks | sed -n "${nth}p")"
    ended 1 '^tensorbus demo: [a-z]* [0-3] was ended by signal 9 (Killed)$' "SIGKILL to rank $nth"
done

# What nobody can tidy up after: at least the processes are gone.
begin
kill -KILL "$demo"
wait "$demo" 2>/dev/null
nothing_left || fail "SIGKILL to the demo: left processes behind: $(in_session "$demo")"

finish
