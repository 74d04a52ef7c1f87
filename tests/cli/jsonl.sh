#!/bin/sh
# --jsonl: one answer a line, bad lines cost only themselves, output that can't be written is noticed.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

side() {
    printf '{"mesh":%s,"ranks":%s,"placements":%s}' "$1" "$2" "$3"
}
good="{\"shape\":[8,4],\"dtype\":\"f32\",\"src\":$(side '[2]' '[0,1]' '[["S",0]]'),\"dst\":$(side '[1]' '[5]' '[["R"]]')}"
good_answer='{"check":"ok","chunks":2,"send_bytes":{"0":64,"1":64,"5":0},"recv_bytes":{"0":0,"1":0,"5":128},"max_send":64,"min_max_send":64}'

# nth N: the N-th line of the last output
nth() {
    sed -n "$1p" "$out"
}

# errs N PATTERN: the N-th line must be an error that matches
errs() {
    nth "$1" | grep -q "^{\"error\":\".*$2.*\"}\$" || fail "line $1: expected an error like '$2': $(nth "$1")"
}

# answers N: the N-th line must be the answer to the good line
answers() {
    [ "$(nth "$1")" = "$good_answer" ] || fail "line $1: $(nth "$1")"
}

{
    printf '%s\n' "$good"
    printf '%s\n' 'not json'
    printf '\n'
    printf '%s\n' '[1,2]'
    printf '%s\n' '{"shape":[8],"shape":[8]}'
    printf '%s\n' "$good trailing"
    printf '%s\n' '{"dtype":"f32"}'
    printf '%s\n' "$good" | sed 's/"f32"/"f31"/'
    printf '%s\n' "$good" | sed 's/,"dtype":"f32"//'
    printf '%s\n' "$good" | sed 's/"src"/"sauce"/'
    printf '%s\n' "$good" | sed 's/\[0,1\]/[0,0]/'
    printf '%s\n' "$good" | sed 's/\[0,1\]/[0,1,2]/'
    printf '%s\n' "$good" | sed 's/\["S",0\]/["S",7]/'
    printf '%s\n' "$good" | sed 's/\["S",0\]/["BS",0,3]/'
    printf '%s\n' "$good" | sed 's/\[8,4\]/[4611686018427387904,4]/'
    printf '%s\n' "$good" | sed 's/\[8,4\]/[-8,4]/'
    printf '%s\n' "$good" | sed 's/"f32"/"\\"\\u00e9\\u0001"/'
    printf '%s' '{"shape":[8,4],"dtype":"'
    printf '\377"}\n'
    printf '%s' "$good"
} >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
lines 19
answers 1
errs 2 'not JSON, at byte'
errs 3 blank
errs 4 'not an object'
errs 5 duplicate
errs 6 'not JSON'
errs 7 shape
errs 8 "'f31' is not a dtype"
errs 9 "'dtype' is not a string"
errs 10 "'src' is not an object"
errs 11 "'src': rank 0 is in the mesh twice"
errs 12 "'src': the mesh has 2 places, but 3 ranks are listed"
errs 13 'src: mesh dim 0 shards dim 7 of a tensor that has 2 dims'
errs 14 'src: '
errs 15 '2^62'
errs 16 shape
errs 17 'is not a dtype'
errs 18 'not JSON'
answers 19

# the end of the file is no line; a blank last line is one
: >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
lines 0
printf '%s\n' "$good" >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
is_exactly "$good_answer"
printf '%s\n  ' "$good" >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
is_exactly "$good_answer"
printf '%s\r\n\n' "$good" >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
lines 2
answers 1
errs 2 blank

# every rank of both meshes, ascending; negative dims; overlapping meshes
printf '%s\n' "{\"shape\":[4],\"dtype\":\"u8\",\"src\":$(side '[2]' '[9,3]' '[["S",-1]]'),\"dst\":$(side '[2]' '[3,1]' '[["S",0]]')}" >"$tmp/lines"
accepted plan --jsonl "$tmp/lines"
is_exactly '{"check":"ok","chunks":2,"send_bytes":{"1":0,"3":2,"9":2},"recv_bytes":{"1":2,"3":2,"9":0},"max_send":2,"min_max_send":2}'

# a line of megabytes
awk 'BEGIN {
    n = 300000
    printf "{\"shape\":[%d],\"mesh\":[1],\"ranks\":[7],\"placements\":[[\"E\",0,[[", 2 * n
    for (i = 0; i < n; i++)
        printf "%s[%d,%d]", i ? "," : "", 2 * i, 2 * i + 1
    print "]]]]}"
}' >"$tmp/lines"
accepted layout --jsonl "$tmp/lines"
lines 1
printed '^{"locals":{"7":{"shape":\[300000\],"dims":\[\[\[0,1\],\[2,3\],'

# answers come line by line: the second line is written only once the first has been answered
mkfifo "$tmp/in" "$tmp/replies"
"$TENSORBUS" plan --jsonl - <"$tmp/in" >"$tmp/replies" &
exec 3>"$tmp/in" 4<"$tmp/replies"
for _ in 1 2; do
    printf '%s\n' "$good" >&3
    read -r reply <&4
    [ "$reply" = "$good_answer" ] || fail "answered '$reply' in a dialogue"
done
exec 3>&- 4<&-
wait $! || fail "the dialogue ended with status $?"

# files that can't be read
refused 'no-such-file: No such file' plan --jsonl "$tmp/no-such-file"
refused 'Is a directory' layout --jsonl "$tmp"

# output that can't be written
unwritable() {
    expect_status 1 "$1"
    [ "$(wc -l <"$err")" -eq 1 ] || fail "$1: said $(wc -l <"$err") lines"
    grep -q "can't write to standard output" "$err" || fail "$1: $(cat "$err")"
}
printf '%s\n' "$good" "$good" >"$tmp/lines"
if [ -w /dev/full ]; then
    "$TENSORBUS" plan --jsonl "$tmp/lines" >/dev/full 2>"$err"
    status=$?
    unwritable 'plan --jsonl to a full disk'
    "$TENSORBUS" --help >/dev/full 2>"$err"
    status=$?
    unwritable '--help to a full disk'
fi
"$TENSORBUS" plan --jsonl "$tmp/lines" >&- 2>"$err"
status=$?
unwritable 'plan --jsonl to a closed output'

# unread ARG...: into a pipe that its reader has closed, nothing is printed and nothing is said
mkfifo "$tmp/pipe"
exec 5<>"$tmp/pipe"
exec 6>"$tmp/pipe" 5<&-
unread() {
    "$TENSORBUS" "$@" >&6 2>"$err"
    status=$?
    expect_status 141 "$* to a closed pipe"
    [ ! -s "$err" ] || fail "$* to a closed pipe: said $(cat "$err")"
}
unread plan --jsonl "$tmp/lines"
unread plan --shape 8 --dtype f32 --src "mesh=4 place=S0" --dst "mesh=2 place=S0"
unread layout --shape 8 --layout 'mesh=2 place=S0' --svg -
unread inspect "$TB_GOLDEN/safetensors/model"
unread inspect "$TB_GOLDEN/safetensors/model" --json
unread config
unread doctor
unread bench --only local --rounds 1 --size 1MiB
unread demo --size 1MiB
unread --help
unread help plan
unread help --man plan
exec 6>&-

finish
