#!/bin/sh
# Pictures are well formed, whatever is drawn, and show what they should.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

picture=$tmp/picture.svg

well_formed() {
    if command -v xmllint >/dev/null; then
        xmllint --noout "$picture" >"$out" 2>&1 || fail "$1: not well formed: $(head -c 500 "$out")"
    fi
    head -n 1 "$picture" | grep -q '^<svg xmlns="http://www.w3.org/2000/svg"' || fail "$1: does not begin with <svg"
    [ "$(tail -n 1 "$picture")" = '</svg>' ] || fail "$1: does not end with </svg>"
    for tag in svg g text title rect pattern; do
        opened=$(grep -o "<${tag}[ >][^>]*" "$picture" | grep -c -v '/$')
        closed=$(grep -o "</$tag>" "$picture" | wc -l)
        [ "$opened" -eq "$closed" ] || fail "$1: <$tag> is opened $opened times and closed $closed times"
    done
    ! grep -q -e 'nan' -e 'inf"' -e 'width="-' -e 'height="-' "$picture" || fail "$1: has impossible numbers"
}

shows() {
    grep -q -e "$1" "$picture" || fail "the picture lacks '$1'"
}

# plan SHAPE DTYPE SRC DST
plan() {
    rm -f "$picture"
    accepted plan --shape "$1" --dtype "$2" --src "$3" --dst "$4" --svg "$picture"
    printed '^check     ok'
    well_formed "plan $*"
}

# layout SHAPE LAYOUT
layout() {
    rm -f "$picture"
    accepted layout --shape "$1" --layout "$2" --svg "$picture"
    printed '^layout '
    well_formed "layout $*"
}

plan 4096,4096 bf16 'mesh=4 place=S0' 'mesh=2,2 place=R,S1 ranks=4..7'
shows '<title>Tensor 4096 x 4096 bf16, 32 MiB</title>'
shows '>mesh=2,2 place=Replicate,Shard(1) ranks=4..7</text>'
shows '<title>\[0:4096, 0:2048\]: ranks 4,6</title>'
shows '>4,6</text>'
shows '<title>3 to 7: 4194304 bytes</title>'
shows '>lower bound 16 MiB</text>'

plan 1001 f32 'mesh=4 place=StridedShard(0,3)' 'mesh=2,3 place=R,S0 ranks=3,2,5,7,9,11'
shows ' bytes that stay</title>'
plan '' f32 'mesh=2 place=R' 'mesh=3 place=R ranks=1..3'
plan 0,4 f32 'mesh=2 place=S0' 'mesh=2 place=S1'
shows '>no elements</text>'
plan 16,512,1024 bf16 'mesh=4,2 place=S0,S1' 'mesh=2,2,2 place=S0,S1,S2 ranks=8..15'
shows '>dims 1 x 2, nested</text>'
plan 7,11,13,3 u8 'mesh=3,2 place=S2,S3' 'mesh=2,2,2 place=S0,S1,S2'
plan 1000,1000 f32 'mesh=2 place=StridedShard(0,500)' 'mesh=2 place=S1'
shows 'sampled</text>'
plan 64,64 f32 'mesh=2,2 place=P,S0' 'mesh=2 place=P(sum) ranks=4,5'
shows 'holds a contribution of its own (sum)</text>'
shows 'filled with zeros</text>'
plan 4096,4096 f32 'mesh=300 place=S0' 'mesh=100 place=S1 ranks=500..599'
shows 'a row is up to 5 ranks, a column up to 2'
plan 4611686018427387904 u8 'mesh=3 place=S0' 'mesh=2 place=S0'
plan 3,4611686018427387 u8 'mesh=3 place=S1' 'mesh=2 place=StridedShard(1,100000)'

layout 4096,4096 'mesh=2,2 place=R,S1'
layout 10 'mesh=2 place=Explicit(0, 0-3,5-6; 2-4)'
shows '>nobody</text>'
layout 100000 'mesh=1000 place=S0'
shows 'and 904 more ranks</text>'
layout '' 'mesh=1 place=R'
layout 5,5,5,5,5,5,5,5 'mesh=2,2,2,2,2,2,2,2 place=S0,S1,S2,S3,S4,S5,S6,S7'

# A page of the same: the picture, and every transfer.
page=$tmp/page.html
accepted plan --shape 256,256 --dtype bf16 --src 'mesh=128 place=S0' --dst 'mesh=4,32 place=R,S1 ranks=128..255' --html "$page"
[ "$(head -n 1 "$page")" = '<!doctype html>' ] || fail "the page begins with $(head -n 1 "$page")"
[ "$(tail -n 1 "$page")" = '</html>' ] || fail "the page ends with $(tail -n 1 "$page")"
[ "$(grep -c '^<svg ' "$page")" -eq 1 ] || fail 'the page has no picture'
[ "$(grep -c '^\[[0-9]*,[0-9]*,32,\[[0-9]*,[0-9]*,[0-9]*,[0-9]*\]\],$' "$page")" -eq 4096 ] || fail 'the page lacks transfers'
! grep -q -e 'PICTURE' -e 'TRANSFERS' -e 'src="http' "$page" || fail 'the page is not complete'
refused 'give it or --svg, not both' plan --shape 8 --dtype f32 --src 'mesh=2 place=S0' --dst 'mesh=1 place=R' --svg - --html -
python3 -B "$(dirname -- "$0")/plan_page.py" "$page" "$tmp" >"$out" 2>&1 || fail "$(cat "$out")"

# - prints the picture alone
accepted layout --shape 8 --layout 'mesh=2 place=S0' --svg -
cp "$out" "$picture"
well_formed 'layout --svg -'

finish
