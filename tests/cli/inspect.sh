#!/bin/sh
# tensorbus inspect: files, models of several files, sets of rank files, and what is refused.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

golden=$TB_GOLDEN/safetensors

# a file
accepted inspect "$golden/every_dtype.safetensors"
lines 24
printed '^checkpoint  .*/every_dtype.safetensors$'
printed '^tensors     19, 135 bytes$'
printed '^metadata    format: pt$'
printed '^tensor  *dtype  *shape  *bytes$'
printed '^a.bf16  *bf16  *2,3  *12$'
printed '^a.f4  *f4e2m1  *2,4  *4$'
printed '^a.f32  *f32  *scalar  *4$'
printed '^b.f32  *f32  *0,4  *0$'
accepted inspect --json "$golden/every_dtype.safetensors"
lines 1
printed '^{"path":".*every_dtype.safetensors","kind":"file","bytes":135,"files":\[{"file":".*","tensors":19,"bytes":135,'
printed '"metadata":{"format":"pt"}}\],"tensors":\[{"name":"a.bf16","dtype":"bf16","shape":\[2,3\],"bytes":12,"file":"'
accepted inspect "$golden/empty.safetensors"
printed '^tensors     0, 0 bytes$'
lines 2

# names that are no text for a terminal
accepted inspect "$golden/names.safetensors"
printed '^????????  *u8  *4  *4$'
printed '^metadata    a "key"?: and '
accepted inspect "$golden/names.safetensors" --json
printed '"name":"\\u0008\\u000c\\u000a\\u000d\\u0009\\u0001\\u001f'

# a model of several files, with and without its directory's final slash
for model in "$golden/model" "$golden/model/"; do
    accepted inspect "$model"
    printed '^checkpoint  .*, a model in 2 files with an index$'
    printed '^tensors     4, 96 bytes$'
    printed '^model-00001-of-00002.safetensors  *2  *66$'
    printed '^layers.1.weight  *bf16  *3,3  *18  *model-00002-of-00002.safetensors$'
    not_printed '^index'
    not_printed '^ignored'
done
[ "$(grep -c '^metadata' "$out")" -eq 1 ] || fail 'what all files say is not said once'
accepted inspect "$golden/model" --json
printed '"kind":"index","bytes":96,"index_bytes":96,"ignored":0,"files":\[{"file":"model-00001-of-00002.safetensors",'
printed '"name":"norm","dtype":"f32","shape":\[3\],"bytes":12,"file":"model-00002-of-00002.safetensors","offset":176}\]}$'

# an index that says less than the files hold
mkdir "$tmp/model"
cp "$golden"/model/model-0000* "$tmp/model"
sed -e 's/"total_size": 96/"total_size": 84/' -e '/"norm"/d' -e 's/\("layers.1.*\),/\1/' \
    "$golden/model/model.safetensors.index.json" >"$tmp/model/model.safetensors.index.json"
accepted inspect "$tmp/model"
printed '^ignored     1 tensor of the files, which the index does not have: norm (model-00002-of-00002.safetensors)$'
not_printed '^norm'
not_printed '^index'
cp "$golden/model/model-00001-of-00002.safetensors" "$tmp/model/model-00003-of-00002.safetensors"
cp "$tmp/err" "$tmp/model/garbage.safetensors"
accepted inspect "$tmp/model"
printed "^ignored     4 tensors of the files, which the index does not have: can't be read \
(garbage.safetensors), norm (model-00002-of-00002.safetensors), embed.weight (model-00003-of-00002.safetensors), layers.0"
accepted inspect "$tmp/model" --json
printed '"ignored":4,.*,"unindexed":\[{"file":"garbage.safetensors"},{"file":"model-00002-of-00002.safetensors","name":"norm"},'
rm "$tmp/model/model-00003-of-00002.safetensors" "$tmp/model/garbage.safetensors"
sed -i 's/84/85/' "$tmp/model/model.safetensors.index.json"
accepted inspect "$tmp/model"
printed '^index       says 85 bytes$'
cp "$golden/empty.safetensors" "$tmp/model/model.safetensors"
accepted inspect "$tmp/model"
printed '^checkpoint  .*, a model in one file$'
printed '^ignored     4 tensors of files that are not read: embed.weight (model-00001-of-00002.safetensors), layers.0.weight'

# a file for each rank
mkdir "$tmp/ranks"
for rank in 0 1 2 10; do
    cp "$golden/model/model-00001-of-00002.safetensors" "$tmp/ranks/rank_$rank.safetensors"
done
cp "$golden/empty.safetensors" "$tmp/ranks/rank_11.safetensors"
accepted inspect "$tmp/ranks"
printed '^tensors     8, 264 bytes$'
printed '^ranks       0..2,10,11; no file for 3..9$'
printed '^  10  rank_10.safetensors  *2  *66$'
printed '^  10  layers.0.weight  *bf16  *3,3  *18$'
printed '^of file     rank_11.safetensors$'
accepted inspect "$tmp/ranks" --json
printed '"kind":"ranks","bytes":264,"files":\[{"file":"rank_0.safetensors","rank":0,"tensors":2,"bytes":66,'
printed '"name":"embed.weight",.*"file":"rank_10.safetensors","offset":184,"rank":10}'
not_printed '"unindexed"'
cp "$golden/empty.safetensors" "$tmp/ranks/extra.safetensors"
cp "$golden/empty.safetensors" "$tmp/ranks/another.safetensors"
accepted inspect "$tmp/ranks"
printed '^ignored     2 files of no rank: another.safetensors, extra.safetensors$'
printed '^ranks       0..2,10,11; no file for 3..9$'
accepted inspect "$tmp/ranks" --json
printed '"unindexed":\[{"file":"another.safetensors"},{"file":"extra.safetensors"}\],"tensors"'
rm "$tmp/ranks/extra.safetensors" "$tmp/ranks/another.safetensors"

# bad input
bad=$tmp/bad.safetensors
refused 'CHECKPOINT_OR_AGENT is missing' inspect
refused 'CHECKPOINT_OR_AGENT is missing' inspect --json
refused "unexpected argument 'b'" inspect a b
refused "unknown option '-'" inspect -
refused "unknown option '--frobnicate'" inspect "$golden/model" --frobnicate
refused '/none: can.t be opened: No such file' inspect "$tmp/none"
refused 'it holds no model.safetensors, no ' inspect "$golden"
refused '/model.safetensors.index.json: it is an index; the model is the directory' \
    inspect "$golden/model/model.safetensors.index.json"
printf 'hello' >"$bad"
refused '/bad.safetensors: it has 5 bytes, too few' inspect "$bad"
printf '\016\0\0\0\0\0\0\0{"a":{"b":1}} ' >"$bad"
refused "/bad.safetensors: tensor 'a': 'dtype' is missing" inspect "$bad"
head -c 1350 "$golden/every_dtype.safetensors" >"$bad"
refused "/bad.safetensors: tensor 'a.bool' has bytes 132 to 135 of the data, but the file has only 134" inspect "$bad"
sed 's/BF16/C640/' "$golden/every_dtype.safetensors" >"$bad"
accepted inspect "$bad"
printed '^a.bf16  *C640  *2,3  *12$'
accepted inspect --json "$bad"
printed '"name":"a.bf16","dtype":"C640","shape":\[2,3\],"bytes":12,'
sed 's/BF16/bf16/' "$golden/every_dtype.safetensors" >"$bad"
refused "/bad.safetensors: tensor 'a.bf16': dtype 'bf16' is not one" inspect --json "$bad"
cp "$bad" "$tmp/ranks/rank_5.safetensors"
refused "/rank_5.safetensors: tensor 'a.bf16': dtype" inspect "$tmp/ranks"
: >"$tmp/ranks/rank_05.safetensors"
refused "'rank_05.safetensors' has the form of a rank's file" inspect "$tmp/ranks"
rm "$tmp/model/model.safetensors" "$tmp/model/model-00002-of-00002.safetensors"
refused '/model-00002-of-00002.safetensors: can.t be opened: No such file' inspect "$tmp/model"

# an output that can't be written is no bad input
if [ -w /dev/full ]; then
    "$TENSORBUS" inspect "$golden/model" >/dev/full 2>"$err"
    status=$?
    expect_status 1 'inspect to a full device'
fi

finish
