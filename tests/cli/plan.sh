#!/bin/sh
# tensorbus plan: the table, one rank, JSON, buckets, hosts.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# plan ARG...: the example of the help, with more options
plan() {
    accepted plan --shape 4096,4096 --dtype bf16 --src 'mesh=4 place=S0' --dst 'mesh=2,2 place=R,S1 ranks=4..7' "$@"
}

plan
printed '^tensor    4096,4096 bf16, 32 MiB (33554432 bytes)$'
printed '^source    mesh=4 place=Shard(0)$'
printed '^target    mesh=2,2 place=Replicate,Shard(1) ranks=4\.\.7$'
printed '^   3  5,7  BROADCAST  \[0:1024, 2048:4096\]       2  8388608  8 MiB$'
printed '^moves     64 MiB (67108864 bytes) between ranks; 16 chunks in all$'
printed '^egress    32 MiB (33554432 bytes) '
printed '^busiest   rank 0 sends 16 MiB (16777216 bytes), which is the lower bound$'
printed '^check     ok'
not_printed '^local'
not_printed '^reduces'
not_printed ' $'
not_printed "$(printf '\033')"

plan --rank 3
printed '^sends  to 4,6  BROADCAST  \[0:1024, 0:2048\] .*\[3072:4096, 0:2048\] *4194304  4 MiB$'
not_printed '^receives'
plan --rank 5
printed '^receives  from 3  BROADCAST  \[0:1024, 2048:4096\]  \[3072:4096, 0:2048\] *4194304  4 MiB$'
plan --rank 99
printed 'it is in neither mesh$'

plan --json
lines 1
printed '^{"shape":\[4096,4096\],"dtype":"bf16","bytes":33554432,"src":"mesh=4 place=Shard(0)","dst":"mesh=2,2 '
printed '"check":"ok","chunks":16,"total_bytes":67108864,"local_bytes":0,"egress_bytes":33554432,"reduce_bytes":0,'
printed '"max_send":16777216,"min_max_send":16777216,"busiest":0,"ranks":\[{"rank":0,"send_bytes":16777216,'
printed '{"source":3,"targets":\[5,7\],"kind":"BROADCAST","chunks":2,"bytes":8388608}\]}$'
plan --json --rank 7
lines 1
printed '^{"rank":7,"routes":\[{"kind":"BROADCAST","is_source":false,"is_target":true,"source":0,"targets":\[5,7\],'
printed '"contributors":\[\],"src":\[\[0,1024\],\[2048,4096\]\],"dst":\[\[0,1024\],\[0,2048\]\],"bytes":4194304}'
plan --json --rank 99
is_exactly '{"rank":99,"routes":[]}'

# local copies, reductions, zeros
accepted plan --shape 8,4 --dtype f32 --src 'mesh=2 place=S0' --dst 'mesh=2 place=S0 ranks=2,1'
printed '^local     64 bytes stay '
printed '^   0  2       P2P '
accepted plan --shape 8,4 --dtype f32 --src 'mesh=2 place=S0' --dst 'mesh=2 place=S0'
printed '^   1  itself  LOCAL '
printed '^moves     0 bytes between ranks; 2 chunks in all$'
not_printed '^busiest'
accepted plan --shape 8,4 --dtype f32 --src 'mesh=2 place=P' --dst 'mesh=1 place=R ranks=2'
printed '^reduces   128 bytes of other ranks'
accepted plan --shape 8,4 --dtype f32 --src 'mesh=2 place=P' --dst 'mesh=1 place=R ranks=2' --rank 1
printed '^contributes  at 0  *NONE '
printed '^sends  *to 2  *P2P '
accepted plan --shape 8,4 --dtype f32 --src 'mesh=1 place=R' --dst 'mesh=2 place=P(sum) ranks=1,2'
printed '^zeros  2 *LOCAL'
accepted plan --shape 8,4 --dtype f32 --src 'mesh=1 place=R' --dst 'mesh=2 place=P(sum) ranks=1,2' --rank 2
printed '^fills with zeros  itself  LOCAL  -  *\[0:8, 0:4\]'
accepted plan --shape 0,4 --dtype f32 --src 'mesh=2 place=S0' --dst 'mesh=2 place=S0'
printed '^moves     0 bytes between ranks; 0 chunks in all$'
accepted plan --shape '' --dtype f32 --src 'mesh=2 place=R' --dst 'mesh=2 place=R ranks=2,3' --json
printed '"chunks":2,"total_bytes":8,'

# a replica on the target's host is preferred
hosts() {
    accepted plan --shape "${2:-64}" --dtype u8 --src 'mesh=2 place=R' --dst 'mesh=2 place=R ranks=2,3' --json --hosts "$1"
}
hosts 0,1,1,0
printed '{"source":0,"targets":\[3\],"kind":"P2P","chunks":1,"bytes":64},{"source":1,"targets":\[2\],"kind":"P2P"'
hosts 0,1,0,1
printed '{"source":0,"targets":\[2\],"kind":"P2P","chunks":1,"bytes":64},{"source":1,"targets":\[3\],"kind":"P2P"'

# what goes to other hosts goes there once, and replicas share it where it is worth it
hosts 0,0,1,1 1048576
printed '"hosts":\[{"from":0,"to":1,"bytes":1048576}\],"ways":\[{"way":"0 > 2 > 3","bytes":524288},{"way":"1 > 2 > 3",'
hosts 0,0,1,1
printed '"hosts":\[{"from":0,"to":1,"bytes":64}\],"ways":\[{"way":"0 > 2 > 3","bytes":64}\]}$'

# a broadcast enters every host once, and is handed on there
fan_out() {
    accepted plan --shape 64 --dtype u8 --src 'mesh=1 place=R' --dst 'mesh=5 place=R ranks=1..5' --hosts 0,1,1,2,2,0 "$@"
}
fan_out
printed '^ *0  *1  *64 *$'
printed '^ *1  *2  *64 *$'
printed '^0 > 1 > (2, 3 > 4)  *64 *$'
fan_out --json
printed '"hosts":\[{"from":0,"to":1,"bytes":64},{"from":1,"to":2,"bytes":64}\],"ways":\[{"way":"0 > 1 > (2, 3 > 4)","bytes":64}\]}$'
fan_out --buckets default --rank 1
printed 'BROADCAST 0 -> 1,2,3,4, 0 sends to 1, 1 sends to 2,3, 3 sends to 4; '

# buckets: of one rank, and of every rank in turn
plan --buckets 16MiB --rank 0
[ -s "$out" ] || fail "no buckets"
cp "$out" "$tmp/rank0"
plan --buckets default --rank 0
cmp -s "$tmp/rank0" "$out" || fail "16MiB is not the default"
plan --buckets 16MiB
[ "$(wc -l <"$out")" -gt "$(wc -l <"$tmp/rank0")" ] || fail "--buckets without --rank shows too little"
plan --buckets 16MiB --json --rank 0
printed '^{"rank":0,'
plan --buckets 16MiB --json
printed '^\[{"rank":0,'
[ "$(grep -c '^\[*{"rank":[0-7],' "$out")" -eq 8 ] || fail "--buckets --json leaves ranks out"

strided() {
    accepted plan --shape 64,64 --dtype f32 --src 'mesh=2 place=StridedShard(0,8)' --dst 'mesh=1 place=R ranks=2' \
        --rank 0 --json --buckets "$1"
}
strided 1
cp "$out" "$tmp/single"
strided 1MiB
cmp -s "$tmp/single" "$out" && fail "--buckets SIZE has no effect"
TENSORBUS_BUCKET_SIZE=1 strided default
cmp -s "$tmp/single" "$out" || fail "--buckets default does not follow TENSORBUS_BUCKET_SIZE"
strided default
cp "$out" "$tmp/default"
TENSORBUS_MAX_IN_FLIGHT=7 strided default
cmp -s "$tmp/default" "$out" && fail "TENSORBUS_MAX_IN_FLIGHT has no effect"
TENSORBUS_STAGING_BYTES=2048 strided default
cmp -s "$tmp/default" "$out" && fail "TENSORBUS_STAGING_BYTES has no effect"

# large worlds stay readable
large() {
    accepted plan --shape 4096,64 --dtype f32 --src 'mesh=64 place=S0' --dst 'mesh=64 place=S1 ranks=64..127' "$@"
}
large
printed '^the largest 32 of 4096; --all shows the others$'
printed '^the busiest 32 of 128 ranks; --all shows the others$'
[ "$(wc -l <"$out")" -lt 100 ] || fail "the table of a large world is too long"
large --all
not_printed 'shows the others'
[ "$(wc -l <"$out")" -gt 4224 ] || fail "--all leaves rows out"
large --rank 0
printed '^32 more; --all shows them$'
large --rank 0 --all
not_printed 'more;'

finish
