#!/bin/sh
# tensorbus layout: the golden layouts, and the table, JSON and one-rank forms.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

golden=$TB_GOLDEN/dtensor_layouts.jsonl
sed 's/^.*,"locals":/{"locals":/' "$golden" >"$tmp/expected"
[ -s "$tmp/expected" ] || fail "no golden layouts in $golden"

accepted layout --jsonl "$golden"
cmp "$tmp/expected" "$out" || fail "the golden layouts differ"
"$TENSORBUS" layout --jsonl - <"$golden" >"$out" || fail "layout --jsonl - failed"
cmp "$tmp/expected" "$out" || fail "the golden layouts differ when read from standard input"

# scalars, empty parts, ranks in any order, our own placements
answer() {
    printf '%s\n' "$1" >"$tmp/line"
    accepted layout --jsonl "$tmp/line"
    is_exactly "$2"
}
answer '{"shape":[],"mesh":[2],"ranks":[3,1],"placements":[["R"]]}' \
    '{"locals":{"3":{"shape":[],"dims":[]},"1":{"shape":[],"dims":[]}}}'
answer '{"shape":[2,3],"mesh":[3],"ranks":[5,0,2],"placements":[["S",0]]}' \
    '{"locals":{"5":{"shape":[1,3],"dims":[[[0,1]],[[0,3]]]},"0":{"shape":[1,3],"dims":[[[1,2]],[[0,3]]]},"2":{"shape":[0,3],"dims":null}}}'
answer '{"shape":[9],"mesh":[4],"placements":[["SS",0,2]]}' \
    '{"locals":{"0":{"shape":[3],"dims":[[[0,2],[5,6]]]},"1":{"shape":[3],"dims":[[[2,4],[6,7]]]},"2":{"shape":[2],"dims":[[[4,5],[7,8]]]},"3":{"shape":[1],"dims":[[[8,9]]]}}}'
answer '{"shape":[6],"mesh":[2],"ranks":[0,1],"placements":[["BS",-1,4,2]]}' \
    '{"locals":{"0":{"shape":[3],"dims":[[[0,2],[4,5]]]},"1":{"shape":[3],"dims":[[[2,4],[5,6]]]}}}'
answer '{"shape":[6],"mesh":[2],"ranks":[0,1],"placements":[["E",0,[[[4,6],[0,1]],[]]]]}' \
    '{"locals":{"0":{"shape":[3],"dims":[[[4,6],[0,1]]]},"1":{"shape":[0],"dims":null}}}'
answer '{"shape":[2],"mesh":[2],"ranks":[0,1],"placements":[["P","sum"]]}' \
    '{"locals":{"0":{"shape":[2],"dims":[[[0,2]]]},"1":{"shape":[2],"dims":[[[0,2]]]}}}'

# the table
accepted layout --shape 4096,4096 --dtype bf16 --layout 'mesh=2,2 place=R,S1 ranks=4..7'
printed '^tensor  4096,4096 bf16, 32 MiB (33554432 bytes)$'
printed '^layout  mesh=2,2 place=Replicate,Shard(1) ranks=4\.\.7$'
printed '^rank  holds      dim 0   dim 1         bytes'
printed '^   7  4096,2048  0-4096  2048-4096  16777216  16 MiB$'
not_printed ' $'

accepted layout --shape 4096,4096 --layout 'mesh=2,2 place=R,S1'
not_printed bytes

accepted layout --shape 9 --layout 'mesh=4 place=StridedShard(0,2)' --rank 2
printed '^   2  2      4-5,7-8$'
lines 5
accepted layout --shape 9 --layout 'mesh=4 place=S0' --rank 9
printed '^rank 9 is not in the mesh'
accepted layout --shape 0,4 --layout 'mesh=2 place=S0'
printed '^   1  0,4    none   0-4$'
accepted layout --shape '' --layout 'mesh=2 place=R' --dtype f64
printed '^tensor  scalar f64, 8 bytes$'
printed '^   1  scalar      8$'

accepted layout --shape 4096 --layout 'mesh=4096 place=S0'
lines 37
printed '^4064 more ranks; --all shows them$'
accepted layout --shape 4096 --layout 'mesh=4096 place=S0' --all
lines 4100

# JSON
accepted layout --shape 5,2 --layout 'mesh=2 place=S0 ranks=7,3' --dtype f32 --json
is_exactly '{"shape":[5,2],"layout":"mesh=2 place=Shard(0) ranks=7,3","dtype":"f32","locals":{"7":{"shape":[3,2],"dims":[[[0,3]],[[0,2]]],"bytes":24},"3":{"shape":[2,2],"dims":[[[3,5]],[[0,2]]],"bytes":16}}}'
accepted layout --shape 5,2 --layout 'mesh=2 place=S0 ranks=7,3' --rank 3 --json
is_exactly '{"shape":[5,2],"layout":"mesh=2 place=Shard(0) ranks=7,3","locals":{"3":{"shape":[2,2],"dims":[[[3,5]],[[0,2]]]}}}'
accepted layout --shape '' --layout 'mesh=1 place=R' --rank 4 --json --dtype u8
is_exactly '{"shape":[],"layout":"mesh=1 place=Replicate","dtype":"u8","locals":{"4":{"shape":[],"dims":null,"bytes":0}}}'

finish
