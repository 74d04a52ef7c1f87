#!/bin/sh
# tensorbus plan --spec: a whole model's figures, times and picture; and pictures of many ranks on many hosts.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# Two matrices cut by rows over ranks 0 and 1 go to ranks 2 and 3, which have all of the first, and half of the second.
cat >"$tmp/spec" <<'JSON'
{"src_mesh": [2], "dst_mesh": {"mesh": [2], "ranks": [2, 3]},
 "tensors": {"a": {"shape": [4, 256], "dtype": "f32", "src": "Shard(0)", "dst": "Replicate"},
             "b": {"shape": [4, 256], "dtype": "f32", "src": "Shard(0)", "dst": "Shard(0)"},
             "c": {"shape": [8], "dtype": "f32", "skip": true}}}
JSON
accepted plan --spec "$tmp/spec" --json
is_exactly '{"tensors":2,"bytes":8192,"moves":12288,"ranks":[{"rank":0,"sends":6144,"receives":0,"keeps":0},{"rank":1,"sends":6144,"receives":0,"keeps":0},{"rank":2,"sends":0,"receives":6144,"keeps":0},{"rank":3,"sends":0,"receives":6144,"keeps":0}],"links":[{"from":0,"to":2,"bytes":4096},{"from":0,"to":3,"bytes":2048},{"from":1,"to":2,"bytes":2048},{"from":1,"to":3,"bytes":4096}]}'
accepted plan --spec "$tmp/spec"
printed '^.*spec: 2 tensors, 8 KiB, 4 ranks$'
printed '^moves     12 KiB (12288 bytes) between ranks$'
printed '^busiest   rank 0 sends 6 KiB$'
not_printed '^host'

# What both hosts' ranks want crosses once, and is handed on by rank 2 or 3; the link is the bottleneck.
accepted plan --spec "$tmp/spec" --hosts 0,0,1,1 --bandwidth 6KiB,16KiB,2KiB
printed '^busiest   rank [23] receives 6 KiB, 1 s at 6 KiB/s$\|^busiest   rank [0-3] sends 6 KiB, 1 s at 6 KiB/s$'
printed '^busiest   host 0 sends 8 KiB, 0\.5 s at 16 KiB/s$'
printed '^busiest   host 0 to host 1: 8 KiB, 4 s at 2 KiB/s$'
printed '^time      at least 4 s$'
accepted plan --spec "$tmp/spec" --hosts 0,0,1,1 --bandwidth 1KiB --json
printed '"hosts":\[{"host":0,"sends":8192,"receives":0},{"host":1,"sends":0,"receives":8192}\]'
printed '"host_links":\[{"from":0,"to":1,"bytes":8192}\],"seconds":6}$'

# A rank on both sides keeps what it has; rules get names, shapes and dtypes from a checkpoint.
python3 - "$tmp/model.safetensors" <<'PYTHON'
import json, struct, sys
header = {f"layers.{i}.w": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [64 * i, 64 * i + 64]} for i in range(3)}
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + bytes(192))
PYTHON
echo '{"src_mesh": [2], "rules": [{"match": "layers.2.*", "skip": true}, {"match": "*", "src": "Shard(0)"}]}' >"$tmp/rules"
accepted plan --spec "$tmp/rules" --in "$tmp/model.safetensors" --json
printed '^{"tensors":2,"bytes":128,"moves":64,"ranks":\[{"rank":0,"sends":0,"receives":64,"keeps":64},{"rank":1,"sends":64,'
refused 'has rules only, which tell no shapes; give --in' plan --spec "$tmp/rules"
echo '{"src_mesh": [2], "rules": [{"match": "*", "dst": {"view": "merge(0,1)"}}]}' >"$tmp/view"
refused 'has a view, or becomes several (rules 0)' plan --spec "$tmp/view" --in "$tmp/model.safetensors"
refused 'No such file' plan --spec "$tmp/none"
refused '--rank does not go with --spec' plan --spec "$tmp/spec" --rank 0
refused '--bandwidth needs --spec' plan --shape 8 --dtype f32 --src 'mesh=1 place=R' --dst 'mesh=1 place=R' --bandwidth 1GB
refused 'that of machines needs --hosts' plan --spec "$tmp/spec" --bandwidth 1GB,2GB
refused "'fast' is not a size" plan --spec "$tmp/spec" --bandwidth fast
refused "'4' is one too many" plan --spec "$tmp/spec" --hosts 0,0,0,0 --bandwidth 1GB,2GB,3GB,4
refused 'host map covers 2 ranks, but rank 3' plan --spec "$tmp/spec" --hosts 0,1

# Experts over 64 ranks to 32, eight ranks to a host: bands have ranks beside them, rows and columns hosts.
hosts=$(seq 0 95 | awk '{ printf "%s%d", (NR > 1 ? "," : ""), int($1 / 8) }')
accepted plan --shape 128,1408,2048 --dtype bf16 --src 'mesh=64 place=S0' --dst 'mesh=32 place=S0 ranks=64..95' \
    --hosts "$hosts" --svg -
printed '>64 bands; the ranks of [0-9]* are at the right<'
printed '>32 bands; the ranks of [0-9]* are at the right<'
for host in 0 7 8 11; do
    printed ">host $host<"
done
printed ' between two ranks<'
accepted plan --spec "$tmp/spec" --hosts 0,0,1,1 --svg -
printed '>2 tensors, 8 KiB<'
printed '>the busiest: rank [0-3] [a-z]* 6 KiB; host 0 sends 8 KiB; host 0 to host 1: 8 KiB<'
printed '>host 1<'
python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$out" || fail 'the picture is no XML'
finish
