#!/bin/sh
# tensorbus reshard: from a model to ranks and back, what is printed, what is refused, and that nothing is left behind.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

model=$TB_GOLDEN/safetensors/model

# octet N: the byte, as printf takes it
octet() {
    printf '\\%03o' "$1"
}

# sparse FILE HEADER NBYTES: a safetensors file whose data is zeros that take no room.
sparse() {
    length=$(printf '%s' "$2" | wc -c)
    printf "$(octet $((length % 256)))$(octet $((length / 256)))\\0\\0\\0\\0\\0\\0%s" "$2" >"$1"
    truncate -s $((8 + length + $3)) "$1"
}

# nothing_left DIR...: none may be there.
nothing_left() {
    for path in "$@"; do
        [ ! -e "$path" ] || fail "$path was left behind: $(ls -A "$path")"
    done
}

# a model of two files to ranks, the same otherwise, and back to a model
cat >"$tmp/split.json" <<'END'
{"dst_mesh": {"mesh": [2], "names": ["tp"]},
 "rules": [{"match": "embed.*", "dst": {"tp": "Shard(1)"}}, {"match": "layers.*", "dst": "S0"}, {"match": "*"}]}
END
cat >"$tmp/other.json" <<'END'
{"src_mesh": [2], "dst_mesh": {"mesh": [3], "ranks": "5..7"},
 "rules": [{"match": "embed.*", "src": "Shard(1)", "dst": "S0"}, {"match": "layers.*", "src": "S0", "dst": [["S", 1]]},
           {"match": "*", "dst": {"dtype": "bf16"}}]}
END
cat >"$tmp/merge.json" <<'END'
{"src_mesh": {"mesh": [3], "ranks": [5, 6, 7]},
 "rules": [{"match": "embed.*", "src": "S0"}, {"match": "layers.*", "src": "S1"},
           {"match": "norm", "dst": {"dtype": "f32"}}, {"match": "*"}]}
END
accepted reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/split" --verify
printed '^tensors   4$'
printed '^ranks     0,1$'
printed '^took .*, verified$'
printed '^memory '
accepted inspect "$tmp/split"
printed '^   0  layers.0.weight  *bf16  *2,3 '
printed '^   1  layers.0.weight  *bf16  *1,3 '
accepted reshard --spec "$tmp/other.json" --in "$tmp/split" --out "$tmp/other" --json --threads 1 --sync
printed '^{"in":".*/split","out":".*/other","src_bytes":108,"dst_bytes":.*,"skipped":0,"ranks":\[{"rank":5,"bytes":'
printed '"name":"norm","shape":\[3\],"src_dtype":"f32","dst_dtype":"bf16","src":"mesh=2 place=Replicate","dst":"mesh=3 '
printed '"verified":false,"peak_memory":[1-9]'
accepted reshard --spec "$tmp/merge.json" --in "$tmp/other" --out "$tmp/merged" --hf --max-file-size 70 --verify
accepted inspect "$tmp/merged"
printed '^checkpoint  .*, a model in 2 files with an index$'
printed '^metadata    format: pt$'
first="model-00001-of-00002.safetensors"
cmp -s "$model/$first" "$tmp/merged/$first" || fail "$first is not what it was" # the other has norm, which was rounded
[ "$(find "$tmp/merged" -type f | wc -l)" -eq 3 ] || fail "strange files: $(ls -A "$tmp/merged")"

# only looking
accepted reshard --spec "$tmp/split.json" --in "$model" --dry-run
printed '^rank  bytes$'
printed '^embed.weight  *[0-9,]* .*  mesh=1 place=Replicate  mesh=2 place=Shard(1) '
accepted reshard --spec "$tmp/split.json" --in "$model" --dry-run --json
printed '"tensors":\[{"name":"embed.weight"'
not_printed seconds
accepted reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/dry" --dry-run
nothing_left "$tmp/dry"

# to fp8 with one scale for all shards, to mxfp8, and back
cat >"$tmp/fp8.json" <<'END'
{"dst_mesh": [2],
 "rules": [{"match": "layers.*", "dst": {"placements": "S0",
                                         "quantisation": {"format": "fp8_tensor", "group": "tensor"}}},
           {"match": "*"}]}
END
cat >"$tmp/mxfp8.json" <<'END'
{"src_mesh": [2],
 "rules": [{"match": "layers.*", "dtype": "f32", "src": {"placements": "S0", "quantisation": "fp8_tensor"},
            "dst": {"quantisation": "mxfp8"}},
           {"match": "*"}]}
END
cat >"$tmp/plain.json" <<'END'
{"rules": [{"match": "layers.*", "src": {"quantisation": "mxfp8"}}, {"match": "*"}]}
END
accepted reshard --spec "$tmp/fp8.json" --in "$model" --dry-run
printed '^layers.0.weight  *3,3  *bf16 to fp8_tensor  '
accepted reshard --spec "$tmp/fp8.json" --in "$model" --out "$tmp/fp8" --verify
accepted inspect "$tmp/fp8"
printed '^   1  layers.0.weight  *f8e4m3  *1,3 '
printed '^   1  layers.0.weight_scale  *f32 '
accepted reshard --spec "$tmp/mxfp8.json" --in "$tmp/fp8" --dry-run
printed '^layers.0.weight  *3,3  *fp8_tensor as f32 to mxfp8  '
accepted reshard --spec "$tmp/mxfp8.json" --in "$tmp/fp8" --out "$tmp/mxfp8" --verify --json
printed '"src_dtype":"f32","dst_dtype":"f8e4m3","src_quantisation":"fp8_tensor","quantisation":"mxfp8","src":'
accepted reshard --spec "$tmp/plain.json" --in "$tmp/mxfp8" --out "$tmp/plain" --hf --verify
accepted inspect "$tmp/plain"
printed '^layers.0.weight  *bf16  *3,3 '
not_printed scale
accepted reshard --spec "$tmp/fp8.json" --in "$tmp/plain" --dry-run --json
printed '"quantisation":"fp8_tensor","group":"layers.0.weight"'

# sharded tensors that the spec takes for replicated
mkdir "$tmp/tp4"
header='{"norm":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"up_proj":{"dtype":"U8","shape":[2,3],"data_offsets":[2,8]}}'
for rank in 0 1 2 3; do
    sparse "$tmp/tp4/rank_$rank.safetensors" "$header" 0
    printf 'nnshard%s' "$rank" >>"$tmp/tp4/rank_$rank.safetensors"
done
printf '{"src_mesh": [4], "rules": [{"match": "*"}]}' >"$tmp/forgotten.json"
printf '{"src_mesh": [4], "rules": [{"match": "up_proj", "src": "Shard(0)"}, {"match": "*"}]}' >"$tmp/complete.json"
for option in --verify --sync; do
    refused "tensor 'up_proj': by the spec ranks 0, 1, 2, 3 hold the same, but in the files ranks 1, 2, 3 differ from \
rank 0, at byte 5 first; do they hold shards of it?" \
        reshard --spec "$tmp/forgotten.json" --in "$tmp/tp4" --out "$tmp/whole" --hf $option
    nothing_left "$tmp/whole"
done
accepted reshard --spec "$tmp/forgotten.json" --in "$tmp/tp4" --dry-run
printed '^replicas  of 2 tensors, 24 B: will be compared with the first$'
accepted reshard --spec "$tmp/complete.json" --in "$tmp/tp4" --out "$tmp/whole" --hf --verify
printed '^replicas  of 1 tensor, 6 B: the same as the first$'
tail -c 26 "$tmp/whole/model.safetensors" | grep -q '^nnshard0shard1shard2shard3$' || fail 'shards that are not what they were'
rm -r "$tmp/whole"
accepted reshard --spec "$tmp/forgotten.json" --in "$tmp/tp4" --out "$tmp/whole" --hf --verify --trust-replicas --json
printed '"replicated":2,"replica_bytes":24,"replicas":"trusted"'
tail -c 8 "$tmp/whole/model.safetensors" | grep -q '^nnshard0$' || fail 'the first replica was not read'
rm -r "$tmp/whole"

# tensors that the index of a model does not have
mkdir "$tmp/indexed"
cp "$model"/model-0000* "$tmp/indexed"
sed -e '/"norm"/d' -e 's/\("layers.1.*\),/\1/' "$model/model.safetensors.index.json" >"$tmp/indexed/model.safetensors.index.json"
refused "/indexed: tensor 'norm' is in 'model-00002-of-00002.safetensors', but not in model.safetensors.index.json; \
--ignore-unindexed goes on without" reshard --spec "$tmp/split.json" --in "$tmp/indexed" --out "$tmp/none"
refused "tensor 'norm' is in " reshard --spec "$tmp/split.json" --in "$tmp/indexed" --dry-run
accepted reshard --spec "$tmp/split.json" --in "$tmp/indexed" --out "$tmp/without" --verify --ignore-unindexed
printed '^index     says 96 bytes, but its tensors have 84$'
printed '^ignored   1 tensor of the files, which the index does not have: norm (model-00002-of-00002.safetensors)$'
printed '^tensors   3$'
rm -r "$tmp/without"
accepted reshard --spec "$tmp/split.json" --in "$tmp/indexed" --dry-run --json --ignore-unindexed
printed '"unindexed":\[{"file":"model-00002-of-00002.safetensors","name":"norm"}\]'
cp "$model/model.safetensors.index.json" "$tmp/indexed"
cp "$TB_GOLDEN/safetensors/names.safetensors" "$tmp/indexed/model-00003-of-00003.safetensors"
refused "' is in 'model-00003-of-00003.safetensors', but not in model.safetensors.index.json, and so for [0-9]* more; " \
    reshard --spec "$tmp/split.json" --in "$tmp/indexed" --out "$tmp/none"
cp "$model/model-00001-of-00002.safetensors" "$tmp/indexed/model-00003-of-00003.safetensors"
refused "tensor 'embed.weight' is in 'model-00003-of-00003.safetensors', but model.safetensors.index.json has it in \
'model-00001-of-00002.safetensors', and so for 1 more; " \
    reshard --spec "$tmp/split.json" --in "$tmp/indexed" --out "$tmp/none"
rm "$tmp/indexed/model-00003-of-00003.safetensors"
cp "$TB_GOLDEN/safetensors/empty.safetensors" "$tmp/indexed/extra.safetensors" # nothing is lost with it
accepted reshard --spec "$tmp/split.json" --in "$tmp/indexed" --dry-run
cp "$model/model-00001-of-00002.safetensors" "$tmp/indexed/model.safetensors"
refused "/indexed: tensor 'layers.1.weight' belongs to 'model-00002-of-00002.safetensors', which is not read, since \
model.safetensors comes before it and does not have the tensor, and so for 3 more; " \
    reshard --spec "$tmp/split.json" --in "$tmp/indexed" --out "$tmp/none"
nothing_left "$tmp/none"

# files beside model.safetensors or beside those of ranks: none is left out in silence, whatever the index says
printf '{"rules": [{"match": "*"}]}' >"$tmp/same.json"
part='model-00002-of-00002.safetensors'
for index in none lacking unreadable; do
    for file in $part rank_0.safetensors extra.safetensors; do
        rm -rf "$tmp/mixed"
        mkdir "$tmp/mixed"
        cp "$model/model-00001-of-00002.safetensors" "$tmp/mixed/model.safetensors"
        cp "$model/$part" "$tmp/mixed/$file"
        wanted="/mixed: tensor 'layers.1.weight' belongs to '$file', which is not read, since model.safetensors comes before \
it and does not have the tensor, and so for 1 more; --ignore-unindexed goes on without"
        ignored="2 tensors of files that are not read: layers.1.weight ($file), norm ($file)"
        case $index in
        lacking) printf '{"weight_map": {"embed.weight": "model.safetensors"}}' >"$tmp/mixed/model.safetensors.index.json" ;;
        unreadable)
            printf '{"weight_map"' >"$tmp/mixed/model.safetensors.index.json"
            wanted=/mixed:
            ignored='3 tensors of files that are not read: '
            ;;
        esac
        refused "$wanted" reshard --spec "$tmp/same.json" --in "$tmp/mixed" --out "$tmp/none"
        refused "$wanted" reshard --spec "$tmp/same.json" --in "$tmp/mixed" --dry-run
        nothing_left "$tmp/none"
        accepted reshard --spec "$tmp/same.json" --in "$tmp/mixed" --dry-run --ignore-unindexed
        printed "^ignored   $ignored"
        printed '^tensors   2$'
    done
done
rm "$tmp/mixed/extra.safetensors"
refused "/mixed: 'model.safetensors.index.json' is beside model.safetensors and can't be read; --ignore-unindexed goes on" \
    reshard --spec "$tmp/same.json" --in "$tmp/mixed" --out "$tmp/none"
rm "$tmp/mixed/model.safetensors.index.json"
cp "$tmp/mixed/model.safetensors" "$tmp/mixed/extra.safetensors"
refused "/mixed: tensor 'embed.weight' belongs to 'extra.safetensors', which is not read, since model.safetensors comes \
before it and has the tensor, and so for 1 more; " \
    reshard --spec "$tmp/same.json" --in "$tmp/mixed" --out "$tmp/none"
for file in extra.safetensors $part; do
    rm -rf "$tmp/mixed"
    mkdir "$tmp/mixed" "$tmp/mixed/folder.safetensors"
    cp "$model/model-00001-of-00002.safetensors" "$tmp/mixed/rank_0.safetensors"
    accepted reshard --spec "$tmp/same.json" --in "$tmp/mixed" --dry-run
    not_printed '^ignored'
    cp "$model/$part" "$tmp/mixed/$file"
    refused "/mixed: '$file' is the file of no rank and is not read; --ignore-unindexed goes on without" \
        reshard --spec "$tmp/same.json" --in "$tmp/mixed" --out "$tmp/none"
    nothing_left "$tmp/none"
    accepted reshard --spec "$tmp/same.json" --in "$tmp/mixed" --dry-run --ignore-unindexed
    printed "^ignored   1 file of no rank: $file$"
    printed '^tensors   2$'
    accepted reshard --spec "$tmp/same.json" --in "$tmp/mixed" --dry-run --ignore-unindexed --json
    printed "\"unindexed\":\[{\"file\":\"$file\"}\]"
done
ln -s nowhere "$tmp/mixed/z.safetensors"
refused "'model-00002-of-00002.safetensors' is the file of no rank and is not read, and so for 1 more; " \
    reshard --spec "$tmp/same.json" --in "$tmp/mixed" --out "$tmp/none"
rm -r "$tmp/mixed"

# bad input: options
out_dir=$tmp/none
refused '--spec is missing' reshard
refused '--in is missing' reshard --spec "$tmp/split.json"
refused '--out is missing' reshard --spec "$tmp/split.json" --in "$model"
refused '--memory: 1k is too small; it is at least 16 MiB' \
    reshard --spec "$tmp/split.json" --in "$model" --out "$out_dir" --memory 1k
refused "--memory: 'much' is not a size" reshard --spec "$tmp/split.json" --in "$model" --out "$out_dir" --memory much
refused "--threads: '0' is not a number" reshard --spec "$tmp/split.json" --in "$model" --out "$out_dir" --threads 0
refused '--max-file-size goes with --hf' \
    reshard --spec "$tmp/split.json" --in "$model" --out "$out_dir" --max-file-size 1M
refused '--hf: the target is one rank, but the spec has 2' \
    reshard --spec "$tmp/split.json" --in "$model" --out "$out_dir" --hf

# bad input: specs and sources
refused '/missing.json: can.t be opened: No such file' reshard --spec "$tmp/missing.json" --in "$model" --out "$out_dir"
printf '{"rules": [{"match": "*", "dst": "Shrad(0)"}]}' >"$tmp/bad.json"
refused "/bad.json: rules 0: dst: 'Shrad(0)' is not a placement" \
    reshard --spec "$tmp/bad.json" --in "$model" --out "$out_dir"
printf '{"rules": [{"match": "embed*"}]}' >"$tmp/bad.json"
refused "tensor 'layers.0.weight': the spec has no entry and no rule for it" \
    reshard --spec "$tmp/bad.json" --in "$model" --out "$out_dir"
printf '{"rules": [{"match": "l*", "dst": {"quantisation": "nvfp4"}}, {"match": "*"}]}' >"$tmp/bad.json"
refused "tensor 'layers.0.weight': nvfp4 has two elements to a byte, and rows of 3 would end inside one" \
    reshard --spec "$tmp/bad.json" --in "$model" --out "$out_dir"
printf '{"rules": [{"match": "l*", "src": {"quantisation": "fp8_block"}}, {"match": "*"}]}' >"$tmp/bad.json"
refused "/model-00001-of-00002.safetensors: tensor 'layers.0.weight' is bf16, but the data of fp8_block is f8e4m3" \
    reshard --spec "$tmp/bad.json" --in "$model" --out "$out_dir"
refused "its source mesh has 2 ranks, but the source is a model" \
    reshard --spec "$tmp/other.json" --in "$model" --out "$out_dir"
refused '/none: can.t be opened: No such file' reshard --spec "$tmp/split.json" --in "$tmp/none" --out "$out_dir"
refused '/split: it holds rank_0.safetensors, rank_1.safetensors; old and new files would be mixed' \
    reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/split"
mv "$tmp/split/rank_1.safetensors" "$tmp/kept"
refused '/rank_1.safetensors: can.t be opened: No such file' \
    reshard --spec "$tmp/other.json" --in "$tmp/split" --out "$out_dir"
head -c 100 "$tmp/kept" >"$tmp/split/rank_1.safetensors"
refused '/rank_1.safetensors: ' reshard --spec "$tmp/other.json" --in "$tmp/split" --out "$out_dir"
cp "$TB_GOLDEN/safetensors/empty.safetensors" "$tmp/split/rank_1.safetensors"
refused "/rank_1.safetensors: tensor 'embed.weight' is not in it" \
    reshard --spec "$tmp/other.json" --in "$tmp/split" --out "$out_dir"
cp "$tmp/kept" "$tmp/split/rank_1.safetensors"
cp "$tmp/kept" "$tmp/split/rank_2.safetensors"
refused '/rank_2.safetensors: rank 2 is in no source mesh of the spec' \
    reshard --spec "$tmp/other.json" --in "$tmp/split" --out "$out_dir"
nothing_left "$out_dir"

# failed PATTERN WHAT: the last run must have failed as the system's failures do.
failed() {
    expect_status 1 "$2"
    [ ! -s "$out" ] || fail "$2: printed something although it failed"
    grep -q -e "$1" "$err" || fail "$2: expected '$1': $(cat "$err")"
}

# the system fails: no place for the directory, a limit, a full disk
run reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/none/deeper"
failed '/none/deeper: can.t be created: No such file' 'a directory in none'
run reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/kept/deeper"
failed '/kept/deeper: can.t be created: Not a directory' 'a directory in a file'
mkdir "$tmp/big"
nbytes=$((256 << 20))
sparse "$tmp/big/rank_0.safetensors" \
    "{\"w\":{\"dtype\":\"U8\",\"shape\":[$((nbytes / 4096)),4096],\"data_offsets\":[0,$nbytes]}}" $nbytes
printf '{"dst_mesh": [2], "rules": [{"match": "*", "dst": "S1"}]}' >"$tmp/big.json"
(
    ulimit -f 1000
    run reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$out_dir"
    echo "$status" >"$tmp/status"
)
status=$(cat "$tmp/status")
failed '/none/rank_0.safetensors: can.t be written: File too large' 'a limit on files'
nothing_left "$out_dir"
mkdir "$tmp/small"
if mount -t tmpfs -o size=200m tmpfs "$tmp/small" 2>/dev/null; then
    run reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$tmp/small/out"
    umount "$tmp/small"
    failed '/small/out/rank_1.safetensors: can.t be written: No space left' 'a full disk'
else
    echo 'not tested: a full disk, since nothing can be mounted here'
fi

# memory stays bounded; the limit leaves room for what a sanitizer adds
accepted reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$tmp/done" --memory 200MiB --json --verify
peak=$(sed 's/.*"peak_memory":\([0-9]*\).*/\1/' "$out")
[ "$peak" -le $((200 << 20)) ] || fail "$peak bytes of memory for $nbytes bytes of tensors"
rm -rf "$tmp/done"

# so it does when everything is looked at for a scale first, and when scales are read
mkdir "$tmp/wide"
sparse "$tmp/wide/rank_0.safetensors" \
    "{\"w\":{\"dtype\":\"BF16\",\"shape\":[$((nbytes / 8192)),4096],\"data_offsets\":[0,$nbytes]}}" $nbytes
printf '{"dst_mesh": [2], "rules": [{"match": "*", "dst": {"placements": "S1", "quantisation": "nvfp4"}}]}' \
    >"$tmp/wide.json"
printf '{"src_mesh": [2], "rules": [{"match": "*", "src": {"placements": "S1", "quantisation": "nvfp4"}}]}' \
    >"$tmp/back.json"
accepted reshard --spec "$tmp/wide.json" --in "$tmp/wide" --out "$tmp/nvfp4" --memory 200MiB --json
peak=$(sed 's/.*"peak_memory":\([0-9]*\).*/\1/' "$out")
[ "$peak" -le $((200 << 20)) ] || fail "$peak bytes of memory to quantise $nbytes bytes of tensors"
accepted reshard --spec "$tmp/back.json" --in "$tmp/nvfp4" --out "$tmp/done" --memory 200MiB --json
peak=$(sed 's/.*"peak_memory":\([0-9]*\).*/\1/' "$out")
[ "$peak" -le $((200 << 20)) ] || fail "$peak bytes of memory to read $nbytes bytes of quantised tensors"
tail -c $nbytes "$tmp/done/rank_0.safetensors" | cmp -s -n $nbytes - /dev/zero || fail 'zeros did not come back'
rm -rf "$tmp/done" "$tmp/nvfp4" "$tmp/wide"

# what killed runs left goes away with the next run
mkdir "$tmp/left"
for file in rank_0.safetensors rank_1.safetensors model.safetensors.index.json; do
    head -c 100000 /dev/zero >"$tmp/left/.$file.4711.0.tmp"
done
: >"$tmp/left/.config.json.1.0.tmp"
accepted reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left" --dry-run
[ -e "$tmp/left/.rank_0.safetensors.4711.0.tmp" ] || fail 'a dry run removed something'
run reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left"
expect_status 0 'a run into a directory with leftovers'
grep -q '^tensorbus reshard: .*/left: removed 3 temporary files ([0-9.]* KiB) of a run that was killed$' "$err" ||
    fail "leftovers: said $(cat "$err")"
[ "$(find "$tmp/left" -type f | wc -l)" -eq 3 ] || fail "strange files: $(ls -A "$tmp/left")"
rm -r "$tmp/left"

# one run at a time: another one has a lock on the directory, or, on another host, on its files only
if command -v flock >/dev/null; then
    mkdir "$tmp/left"
    head -c 1000 /dev/zero >"$tmp/left/.rank_0.safetensors.4711.0.tmp"
    mkfifo "$tmp/locked" "$tmp/enough"
    for held in "$tmp/left" "$tmp/left/.rank_0.safetensors.4711.0.tmp"; do
        # shellcheck disable=SC2016 # the inner shell expands these
        flock -x "$held" sh -c 'echo >"$1"; read -r line <"$2"' - "$tmp/locked" "$tmp/enough" &
        holder=$!
        read -r _ <"$tmp/locked"
        refused '/left: another run writes into this directory' \
            reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left"
        refused '/left: another run writes into this directory' \
            reshard --spec "$tmp/same.json" --in "$model" --out "$tmp/left" --hf
        [ "$(ls -A "$tmp/left")" = .rank_0.safetensors.4711.0.tmp ] || fail "strange files: $(ls -A "$tmp/left")"
        echo >"$tmp/enough"
        wait "$holder"
    done
    run reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left"
    expect_status 0 'a run after another one has ended'
    [ "$(find "$tmp/left" -type f | wc -l)" -eq 2 ] || fail "strange files: $(ls -A "$tmp/left")"
    rm -r "$tmp/left"
else
    echo 'not tested: a directory that another run has, since there is no flock'
fi

# a run that was killed while files of ranks got their names: nothing is removed, and the sentence says what is there
mkdir "$tmp/left"
cp "$TB_GOLDEN/safetensors/empty.safetensors" "$tmp/left/rank_0.safetensors"
head -c 1000 /dev/zero >"$tmp/left/.rank_1.safetensors.4711.1.tmp"
for option in --verify --sync; do
    refused "/left: it holds rank_0.safetensors, and temporary files (.rank_1.safetensors.4711.1.tmp): a run was killed, \
maybe while it put its files in place; remove all of them, or write into another directory" \
        reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left" $option
    [ "$(find "$tmp/left" -type f | wc -l)" -eq 2 ] || fail "strange files: $(ls -A "$tmp/left")"
done
rm -r "$tmp/left"

# a run that was killed while files got their names: the index comes last, so there is no model yet
mkdir "$tmp/left"
: >"$tmp/left/model-00001-of-00002.safetensors"
refused '/left: it holds model-00001-of-00002.safetensors; old and new files would be mixed' \
    reshard --spec "$tmp/same.json" --in "$model" --out "$tmp/left" --hf --max-file-size 30
: >"$tmp/left/.model-00002-of-00002.safetensors.4711.1.tmp"
: >"$tmp/left/.model.safetensors.index.json.4711.2.tmp"
run reshard --spec "$tmp/same.json" --in "$model" --out "$tmp/left" --hf --max-file-size 70 --verify
expect_status 0 'a run after one that was killed at its end'
accepted inspect "$tmp/left"
printed '^tensors     4, 96 bytes$'
not_printed '^ignored'
[ "$(find "$tmp/left" -type f | wc -l)" -eq 3 ] || fail "strange files: $(ls -A "$tmp/left")"
rm -r "$tmp/left"

# no file that the new checkpoint would not have, in whichever kind
mkdir "$tmp/left"
: >"$tmp/left/extra.safetensors"
refused '/left: it holds extra.safetensors; old and new' reshard --spec "$tmp/split.json" --in "$model" --out "$tmp/left"
refused '/left: it holds extra.safetensors; old and new' \
    reshard --spec "$tmp/same.json" --in "$model" --out "$tmp/left" --hf
[ "$(ls -A "$tmp/left")" = extra.safetensors ] || fail "strange files: $(ls -A "$tmp/left")"
rm -r "$tmp/left"

# the same with a run that is killed
"$TENSORBUS" reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$tmp/killed" --threads 1 --verify --sync \
    >"$out" 2>"$err" &
pid=$!
tries=0
while [ $tries -lt 1000 ] && [ -z "$(ls -A "$tmp/killed" 2>/dev/null)" ] && kill -0 $pid 2>/dev/null; do
    tries=$((tries + 1))
    sleep 0.01
done
kill -KILL $pid 2>/dev/null
wait $pid 2>/dev/null
status=$?
if [ "$status" -eq 137 ]; then
    run reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$tmp/killed"
    expect_status 0 'a run after one that was killed'
    grep -q '/killed: removed [12] temporary files* (.*) of a run that was killed$' "$err" ||
        fail "after a run that was killed: said $(cat "$err")"
    [ "$(find "$tmp/killed" -type f | wc -l)" -eq 2 ] || fail "strange files: $(ls -A "$tmp/killed")"
else
    echo 'not tested: a run that is killed, since it was over before that'
fi
rm -rf "$tmp/killed"

# tensors of dtypes that are not known: copied whole, with their bytes, dtype and shape; not cut, not cast
header='{"w":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},"z":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[32,35]},'
header=$header'"freqs":{"dtype":"C64","shape":[2,2],"data_offsets":[35,67]}}'
mkdir "$tmp/unknown"
sparse "$tmp/unknown/model.safetensors" "$header" 0
printf 'wwwwwwww........WWWWWWWW--------z6zfffffffffffffffFFFFFFFFFFFFFFF__' >>"$tmp/unknown/model.safetensors"
spec() {
    printf '{"dst_mesh": [2], "rules": [{"match": "w", "dst": "S0"}, %s {"match": "*"}]}' "$1" >"$tmp/unknown.json"
}
spec ''
accepted reshard --spec "$tmp/unknown.json" --in "$tmp/unknown" --out "$tmp/unknown_ranks" --verify
accepted reshard --spec "$tmp/unknown.json" --in "$tmp/unknown" --out "$tmp/unknown_dry" --dry-run --json
printed '"name":"freqs","shape":\[2,2\],"src_dtype":"C64","dst_dtype":"C64",'
for rank in 0 1; do
    accepted inspect "$tmp/unknown_ranks/rank_$rank.safetensors"
    printed '^freqs  *C64  *2,2  *32$'
    printed '^w  *f32  *2,2  *16$'
    printed '^z  *F6_E2M3  *4  *3$'
done
[ "$(tail -c 51 "$tmp/unknown_ranks/rank_0.safetensors")" = 'fffffffffffffffFFFFFFFFFFFFFFF__wwwwwwww........z6z' ] ||
    fail "rank 0 has other bytes: $(tail -c 51 "$tmp/unknown_ranks/rank_0.safetensors")"
[ "$(tail -c 51 "$tmp/unknown_ranks/rank_1.safetensors")" = 'fffffffffffffffFFFFFFFFFFFFFFF__WWWWWWWW--------z6z' ] ||
    fail "rank 1 has other bytes: $(tail -c 51 "$tmp/unknown_ranks/rank_1.safetensors")"
echo '{"src_mesh": [2], "rules": [{"match": "w", "src": "S0"}, {"match": "*"}]}' >"$tmp/unknown_back.json"
accepted reshard --spec "$tmp/unknown_back.json" --in "$tmp/unknown_ranks" --out "$tmp/unknown_back" --hf --verify
[ "$(tail -c 67 "$tmp/unknown_back/model.safetensors")" = \
    'fffffffffffffffFFFFFFFFFFFFFFF__wwwwwwww........WWWWWWWW--------z6z' ] ||
    fail "the model has other bytes: $(tail -c 67 "$tmp/unknown_back/model.safetensors")"
# unknown_refused PATTERN RULE
unknown_refused() {
    spec "$2,"
    refused "$1" reshard --spec "$tmp/unknown.json" --in "$tmp/unknown" --out "$tmp/unknown_refused"
    nothing_left "$tmp/unknown_refused"
}
unknown_refused "tensor 'freqs' is C64, a dtype that tensorbus does not know: it can be copied whole, but mesh dim 0 of 'dst'" \
    '{"match": "freqs", "dst": "S1"}'
unknown_refused "tensor 'z' is F6_E2M3, a dtype .* can't be cast to bf16" '{"match": "z", "dst": {"dtype": "bf16"}}'
unknown_refused "tensor 'freqs' is C64, .* can't be cast to mxfp8" '{"match": "freqs", "dst": {"quantisation": "mxfp8"}}'
unknown_refused "tensor 'freqs' is C64, but the spec says f32" '{"match": "freqs", "dtype": "f32"}'
unknown_refused "tensor 'freqs' is \[*2,2\]*, but the spec says \[*4\]*" '{"match": "freqs", "shape": [4]}'
spec '{"match": "freqs", "skip": true},'
accepted reshard --spec "$tmp/unknown.json" --in "$tmp/unknown" --out "$tmp/unknown_skipped" --verify
accepted inspect "$tmp/unknown_skipped"
not_printed 'freqs'
# ranks that differ in bytes, or in the dtype
printf 'y' | dd of="$tmp/unknown_ranks/rank_1.safetensors" conv=notrunc bs=1 2>/dev/null \
    seek=$(($(wc -c <"$tmp/unknown_ranks/rank_1.safetensors") - 1))
refused "'z'.*differ" reshard --spec "$tmp/unknown_back.json" --in "$tmp/unknown_ranks" --out "$tmp/unknown_refused"
sed -i s/F6_E2M3/F6_E3M2/ "$tmp/unknown_ranks/rank_1.safetensors"
refused "rank_1.*'z' is .* of F6_E3M2, but another rank has it as .* of F6_E2M3" \
    reshard --spec "$tmp/unknown_back.json" --in "$tmp/unknown_ranks" --out "$tmp/unknown_refused"
nothing_left "$tmp/unknown_refused"

# a run that is ended from outside tidies up
"$TENSORBUS" reshard --spec "$tmp/big.json" --in "$tmp/big" --out "$tmp/ended" --threads 1 --verify --sync \
    >"$out" 2>"$err" &
pid=$!
tries=0
while [ $tries -lt 1000 ] && [ -z "$(ls -A "$tmp/ended" 2>/dev/null)" ] && kill -0 $pid 2>/dev/null; do
    tries=$((tries + 1))
    sleep 0.01
done
kill -TERM $pid 2>/dev/null
wait $pid
status=$?
if [ "$status" -eq 0 ]; then
    echo 'not tested: an end from outside, since the run was over before it'
else
    expect_status 143 'a run that is ended'
    nothing_left "$tmp/ended"
fi

finish
