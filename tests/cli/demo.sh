#!/bin/sh
# tensorbus demo: a model arrives, every element of it; whatever ends the demo leaves nothing behind.
# shellcheck source=tests/cli/ranks.sh
. "$(dirname -- "$0")/ranks.sh"

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
printed '^version  delivered  *ms  *GB/s  of memcpy  *plan  *wait  *pack  *wire  *unpack  *commit$'
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

# settings take part, and so does the path between machines, which packs
TENSORBUS_BUCKET_SIZE=1000 TENSORBUS_STAGING_BYTES=64k moved "$once" '1 rank' --size 100k --ranks 4,1
moved '[0-9]*' '4 ranks' --size 8MiB
printed '^ *1 .* 0\.0  *[0-9.]*  *0\.0  *[0-9.]*$' # nothing is packed, nothing unpacked
moved '[0-9]*' '4 ranks' --size 8MiB --staged
not_printed '^ *1 .* 0\.0  *[0-9.]*  *0\.0  *[0-9.]*$'
TENSORBUS_BUCKET_SIZE=4k TENSORBUS_STAGING_BYTES=64k TENSORBUS_MAX_IN_FLIGHT=1 \
    moved "$once" '3 ranks' --size 100k --ranks 4,3 --staged --dst 'mesh=3 place=Shard(0)'

# by_agents ELEMENTS RANKS ARG...: the same through agents, one of which is killed: that version fails, and comes again
by_agents() {
    elements=$1
    ranks=$2
    shift 2
    accepted demo --bus "$@"
    printed "^verified  all $elements elements on $ranks, in each of 3 versions\$"
    for version in 1 2 3; do
        printed "^ *$version  committed  *[0-9.]* [KMG]iB  *[0-9.]*  *[0-9.]*  *[0-9]*%  yes\$"
    done
    printed '^ *2  failed$'
    [ "$(grep -c ' failed$' "$out")" -eq 1 ] || fail "$*: more than one version failed: $(cat "$out")"
    clean "--bus $*"
}

by_agents 33580032 '4 ranks' --size 32MiB
printed '^version  result  *delivered  *ms  *GB/s  of memcpy  verified$'
printed '^killed    the agent of inference 1, while version 2 was under way$'
printed '^          inference 1 was told after [0-9.]* ms: the agent at .* is gone: '
printed '^          [1-7] others\{0,1\} after [0-9.]* ms.*; [a-z]* [0-3]: rank [0-7] (inference 1) was lost during batch'
printed '^restarted in [0-9]* ms; [0-9]* ms later all had made the pair and registered again$'
by_agents "$once" '1 rank' --size 100k --ranks 1
printed '^killed    the agent of inference 0,'
by_agents "$once" '3 ranks' --size 100k --ranks 2,3 --staged --dst 'mesh=3 place=Shard(0)'

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
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    TERM=xterm script -qec "'$TENSORBUS' demo --size 1MiB" /dev/null >"$out" 2>"$err" </dev/null || fail "on a terminal"
    printed 'version 1 of 3  filling '
    tr '\r' '\n' <"$out" | grep -q 'verified  all [0-9]* elements' || fail "on a terminal: $(cat "$out")"
    tr '\r' '\n' <"$out" | sed -n '/^.\[Kmodel /p' | grep -q . || fail "the moving line was not cleared: $(cat "$out")"
else
    printf 'not tested without script and terminals: the moving line\n'
fi

# has_met: waits until the ranks have met, which is when their folder goes; false if the demo has ended
has_met() {
    while is_running; do
        [ -n "$(ls -A "$TMPDIR")" ] || return 0
        sleep 0.01
    done
    return 1
}

# begin [met] [ARG...]: a demo at work, which can't come to its end because its first rank is stopped. One that was faster is
# followed by a larger one.
begin() {
    met=${1-}
    [ $# -eq 0 ] || shift
    for size in 128MiB 512MiB 2GiB; do
        start demo --size "$size" "$@"
        if { [ -z "$met" ] || has_met; } && hold; then
            return 0
        fi
        wait "$job" || fail "a demo of $size failed: $(cat "$err")"
    done
    fail "no demo was caught at work"
}

begin
kill -INT "$job"
ended 130 '^tensorbus demo: ended by signal 2 (Interrupt)$' 'SIGINT to the demo'

begin
kill -INT "-$job"
ended 130 '^tensorbus demo: ended by signal 2 (Interrupt)$' 'SIGINT to the group'

begin
kill -TERM "-$job"
ended 143 '^tensorbus demo: ended by signal 15 (Terminated)$' 'SIGTERM to the group'

# a rank of each side, while others wait for them
for nth in 2 7; do
    begin
    kill -KILL "$(ranks | sed -n "${nth}p")"
    ended 1 '^tensorbus demo: [a-z]* [0-3] was ended by signal 9 (Killed)$' "SIGKILL to rank $nth"
done

# What nobody can tidy up after: the ranks go with it, and the folder has been gone since they met.
begin met
kill -KILL "$job"
wait "$job" 2>/dev/null
nothing_left || fail "SIGKILL to the demo: left processes behind: $(in_session "$job")"
clean 'SIGKILL to the demo'

# The same with agents, which are the tool's last eight children; the store comes before them.
begin_bus() {
    begin '' --bus
    tries=0
    while [ "$(ranks | wc -l)" -lt 17 ]; do
        tries=$((tries + 1))
        if [ "$tries" -gt 3000 ] || ! is_running; then
            fail "--bus: there are $(ranks | wc -l) processes: $(cat "$err")"
            return
        fi
        sleep 0.02
    done
}

begin_bus
kill -INT "-$job"
ended 130 '^tensorbus demo: ended by signal 2 (Interrupt)$' 'SIGINT to the group of agents'

begin_bus
kill -TERM "-$job"
ended 143 '^tensorbus demo: ended by signal 15 (Terminated)$' 'SIGTERM to the group of agents'

begin_bus
kill -KILL "$(ranks | sed -n 4p)"
ended 1 '^tensorbus demo: trainer 3 was ended by signal 9 (Killed)$' 'SIGKILL to a client'

begin_bus
kill -KILL "$(ranks | sed -n 15p)"
kill -CONT "$first"
ended 1 '^tensorbus demo: the agent of inference 1 was ended by signal 9 (Killed)$' 'SIGKILL to an agent'

begin_bus
kill -KILL "$job"
wait "$job" 2>/dev/null
nothing_left || fail "SIGKILL to the demo with agents: left processes behind: $(in_session "$job")"
clean 'SIGKILL to the demo with agents'

finish
