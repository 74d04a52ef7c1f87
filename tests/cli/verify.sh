#!/bin/sh
# tensorbus verify: equal whatever the sharding, and where what differs is; lists of hashes; what is refused.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

golden=$TB_GOLDEN/safetensors
model=$golden/model

# differs ARG...: the tool must exit with 1, and say what differs on standard output alone.
differs() {
    run "$@"
    expect_status 1 "$*"
    [ ! -s "$err" ] || fail "$*: said $(head -c 300 "$err")"
}

# poke FILE OFFSET: changes a byte.
poke() {
    byte=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
    # shellcheck disable=SC2059 # the format is the byte
    printf "\\$(printf '%03o' $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# data FILE TENSOR: where the tensor's data begins in the file.
data() {
    "$TENSORBUS" inspect "$1" --json | sed "s/.*\"name\":\"$2\",[^}]*\"offset\":\([0-9]*\).*/\1/"
}

# one checkpoint
accepted verify "$model"
lines 5
printed '^1cac0aceedbc7fbe  f32  *4,3  *embed.weight$'
accepted verify "$golden/every_dtype.safetensors" --json
cp "$out" "$tmp/hashes"
printed '^"a.bf16":{"dtype":"bf16","shape":\[2,3\],"hash":"51b2b29637283e6d"},$'
accepted verify "$golden/every_dtype.safetensors" --hashes "$tmp/hashes"
is_exactly 'equal: 19 tensors'

# in two files with an index, in one, and on ranks
cat >"$tmp/one.json" <<'END'
{"rules": [{"match": "*"}]}
END
cat >"$tmp/split.json" <<'END'
{"dst_mesh": {"mesh": [2, 2], "names": ["dp", "tp"]},
 "rules": [{"match": "embed.*", "dst": {"tp": "Shard(1)"}}, {"match": "layers.*", "dst": {"dp": "S0", "tp": "S1"}},
           {"match": "*"}]}
END
sed 's/dst/src/g' "$tmp/split.json" >"$tmp/ranks.json"
accepted reshard --spec "$tmp/one.json" --in "$model" --out "$tmp/one" --hf
accepted reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/split"
accepted verify "$model" "$tmp/one"
is_exactly 'equal: 4 tensors'
accepted verify "$model" "$tmp/split" --spec "$tmp/split.json"
is_exactly 'equal: 4 tensors'
accepted verify "$tmp/split" "$tmp/one" --spec "$tmp/ranks.json" --threads 1
accepted verify "$model" --json
cp "$out" "$tmp/hashes"
accepted verify "$tmp/split" --spec "$tmp/ranks.json" --hashes "$tmp/hashes" --json
is_exactly '{"equal":4,"different":[]}'

# ranks that have nothing of a tensor
echo '{"dst_mesh": [4], "rules": [{"match": "*", "dst": "S0"}]}' >"$tmp/even.json"
accepted reshard --spec "$tmp/even.json" --in "$model" --out "$tmp/even"
accepted verify "$model" "$tmp/even" --spec "$tmp/even.json"
is_exactly 'equal: 4 tensors'

# one element of one rank: in a part that is cut, in a replica
poke "$tmp/split/rank_3.safetensors" "$(data "$tmp/split/rank_3.safetensors" layers.1.weight)"
differs verify "$model" "$tmp/split" --spec "$tmp/split.json"
printed '^layers.1.weight: 9bac2364815d10fb in the first, .* in the second$'
printed '^  \[2:3, 2:3\], rank 3 of the second: 1 of 1 elements$'
printed '^different: 1 of 4 tensors$'
lines 3
poke "$tmp/split/rank_2.safetensors" "$(($(data "$tmp/split/rank_2.safetensors" norm) + 4))"
differs verify "$tmp/split" "$model" --spec "$tmp/ranks.json" --json
printed '"equal":2,"different":\[{"name":"layers.1.weight",'
printed '{"name":"norm","hash_a":"f6e1b67d9d254d34","hash_b":"f6e1b67d9d254d34","boxes":\[{"elements":1,"of":3,"rank_a":2,'
printed '"rank_a":2,"start":\[1\],"size":\[1\]}\]}\]}$'
refused "'norm': replicas differ" verify "$tmp/split" --spec "$tmp/ranks.json"

# another element, dtype, name; a list
poke "$tmp/one/model.safetensors" "$(($(data "$tmp/one/model.safetensors" embed.weight) + 16))"
differs verify "$model" "$tmp/one"
printed '^  \[1:2, 1:2\]: 1 of 12 elements$'
differs verify "$tmp/one" --hashes "$tmp/hashes"
printed '^embed.weight: .* in the first, 1cac0aceedbc7fbe in the second$'
cat >"$tmp/bf16.json" <<'END'
{"rules": [{"match": "norm", "dst": {"dtype": "bf16"}}, {"match": "embed.*", "skip": true}, {"match": "*"}]}
END
accepted reshard --spec "$tmp/bf16.json" --in "$model" --out "$tmp/bf16" --hf
differs verify "$model" "$tmp/bf16"
printed '^embed.weight: is not in '
printed '^norm: f32 3 in the first, bf16 3 in the second$'
differs verify "$tmp/bf16" "$model" --json
printed '{"name":"embed.weight","missing_in":"a"}'

# a tensor of several tiles
header='{"w":{"dtype":"U8","shape":[3,1048576],"data_offsets":[0,3145728]}}'
printf "\\$(printf '%03o' ${#header})\\0\\0\\0\\0\\0\\0\\0%s" "$header" >"$tmp/large.safetensors"
truncate -s $((8 + ${#header} + 3145728)) "$tmp/large.safetensors"
accepted verify "$tmp/large.safetensors" --json
cp "$out" "$tmp/hashes"
cp "$tmp/large.safetensors" "$tmp/poked.safetensors"
poke "$tmp/poked.safetensors" $((8 + ${#header} + 2097152 + 7))
differs verify "$tmp/large.safetensors" "$tmp/poked.safetensors"
printed '^w: .* first in the 1048576 elements from number 2097152$'
printed '^  \[2:3, 7:8\]: 1 of 3145728 elements$'
"$TENSORBUS" verify "$tmp/poked.safetensors" --hashes - --json <"$tmp/hashes" >"$out"
printed '"elements_from":2097152'

# what is refused
refused 'CHECKPOINT is missing' verify
refused 'no_such' verify "$tmp/no_such"
refused 'unexpected argument' verify a b c
refused 'has files of ranks: --spec FILE says' verify "$model" "$tmp/split"
refused 'takes the place of the second' verify "$model" "$tmp/one" --hashes "$tmp/hashes"
refused 'is no list of hashes' verify "$model" --hashes "$tmp/one.json"
echo '{"hashes":1,"tile":1048576,"tensors":{"w":{"dtype":"f32","shape":[1],"hash":"xyz"}}}' >"$tmp/bad"
refused "--hashes: tensor 'w': a hash is 16 digits" verify "$model" --hashes "$tmp/bad"
refused 'is not a number between' verify "$model" --threads 0
finish
