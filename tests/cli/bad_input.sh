#!/bin/sh
# Bad input gets one sentence, exit status 2, and no output.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

src='mesh=4 place=S0'
dst='mesh=2 place=R ranks=4,5'

# commands and options
refused "there is no command 'plam'.*tensorbus --help" plam
refused "there is no command 'plam'" help plam
refused "there is no command 'plam'; did you mean 'plan'?" plam
refused "there is no command 'insepct'; did you mean 'inspect'?" insepct
refused 'explain is a command of the Python package' explain --trainer fsdp:4
refused "there is no command 'reshards'; did you mean 'reshard'?" help reshards
refused "there is no command 'x'; .tensorbus" x
refused "there is no command 'converge'; .tensorbus" converge
refused "there is no command 'a word that is longer than any command or option'; .t" \
    'a word that is longer than any command or option'
refused "unknown option '--shap'; did you mean '--shape'? See .tensorbus plan --help" plan --shap 8
refused "unknown option '-shape'; did you mean '--shape'?" plan -shape 8
refused "unknown option '--max-file'; did you mean '--max-file-size'?" reshard --max-file=1GB
refused "unknown option '--trust-replica'; did you mean '--trust-replicas'?" reshard --trust-replica
refused "unknown option '--verison'; did you mean '--version'?" --verison
refused "unknown option '--verbose'; see .tensorbus --help" --verbose
refused "--version stands alone, but 'plan' follows it" --version plan
refused 'takes one command' help plan layout
for command in layout plan reshard store config doctor demo bench agent status top; do
    refused "^tensorbus $command: unknown option '--frobnicate'; see .tensorbus $command --help" $command --frobnicate=3
    refused "unknown option '-x'" $command -x
    refused "unknown option '-'" $command -
    refused "unknown option '--'" $command --
    refused "unexpected argument 'extra'" $command extra
done
refused '--shape is missing' plan
refused '--shape is missing' layout
refused '--dtype is missing' plan --shape 8
refused '--src is missing' plan --shape 8 --dtype f32
refused '--dst is missing' plan --shape 8 --dtype f32 --src "$src"
refused '--layout is missing' layout --shape 8
refused '--shape needs a value' plan --shape
refused '--jsonl needs a value' layout --jsonl
refused '--shape is given twice' plan --shape 8 --shape 8
refused "--json takes no value, but is given 'yes'" plan --json=yes
refused '--jsonl does not go with --json' plan --jsonl - --json
refused '--jsonl does not go with --shape' layout --shape 8 --jsonl -
refused '^tensorbus plan: unexpected argument .a?b.;' plan "$(printf 'a\nb')"

refused "--only: there is no line 'rowcol'" bench --only row_col,rowcol
refused "--only: there is no line ''" bench --only row_col,
refused "--only: 'net_row_col' is measured with --hosts" bench --only net_row_col
refused "--only: 'row_col' is measured without --hosts" bench --hosts --only net_row_col,row_col
refused '--hosts does not go with --peers' bench --hosts --peers
for rounds in 0 -1 1001 five '5 '; do
    refused "--rounds: '$rounds' is not a number between 1 and 1000" bench --rounds "$rounds"
done
refused "--size: 'big' is not a size" bench --size big
refused '--size: 1023KiB is not between 1MiB and 1TiB' bench --size 1023KiB
refused '--size: 1025GiB is not between' bench --size 1025GiB

# plan_refused PATTERN SHAPE DTYPE SRC DST [ARG...]
plan_refused() {
    pattern=$1
    arguments="--shape $2 --dtype $3"
    from=$4
    to=$5
    shift 5
    # shellcheck disable=SC2086 # words
    refused "$pattern" plan $arguments --src "$from" --dst "$to" "$@"
}

# shapes and dtypes
plan_refused "shape '8x8' is not a list" 8x8 f32 "$src" "$dst"
plan_refused "shape '-8' is not a list" -8 f32 "$src" "$dst"
plan_refused "shape '8,' is not a list" 8, f32 "$src" "$dst"
plan_refused 'more than 8 dims' 1,1,1,1,1,1,1,1,1 f32 "$src" "$dst"
plan_refused "is not a list" 99999999999999999999 f32 "$src" "$dst"
plan_refused '2^62' 4294967296,4294967296 f32 "$src" "$dst"
plan_refused '2^62' 4611686018427387904 f32 "$src" "$dst"
plan_refused "'f33' is not a dtype" 8 f33 "$src" "$dst"

# layouts
plan_refused '^tensorbus plan: --src: .*mesh= and place=' 8 f32 'mesh=4' "$dst"
plan_refused '^tensorbus plan: --src: .*mesh= and place=' 8 f32 '' "$dst"
plan_refused '^tensorbus plan: --dst: rank 4 is in the mesh twice' 8 f32 "$src" 'mesh=2 place=R ranks=4,4'
plan_refused '--dst: the mesh has 2 places, but 3 ranks are listed' 8 f32 "$src" 'mesh=2 place=R ranks=4..6'
plan_refused '--src: the mesh has 2 dims, but there are 1 placements' 8 f32 'mesh=2,2 place=S0' "$dst"
plan_refused '--src: mesh dim 0 has size 0' 8 f32 'mesh=0 place=S0' "$dst"
plan_refused '--src: the mesh has more than 1048576 ranks' 8 f32 'mesh=1048577 place=S0' "$dst"
plan_refused '--src: rank -1 is not between' 8 f32 'mesh=1 place=S0 ranks=-1' "$dst"
plan_refused '--src: .*is not a placement' 8 f32 'mesh=4 place=X' "$dst"
plan_refused '--src: ' 8 f32 'mesh=4 place=S0 color=red' "$dst"
plan_refused 'src: mesh dim 0 shards dim 1 of a tensor that has 1 dims' 8 f32 'mesh=4 place=S1' "$dst"
plan_refused 'dst: mesh dim 0 shards dim -2' 8 f32 "$src" 'mesh=4 place=S-2'
plan_refused 'src: ' 8 f32 'mesh=4 place=BlockShard(0,3,4)' "$dst"
plan_refused 'src: .*mixed' 8 f32 'mesh=2,2 place=P(sum),P(max)' "$dst"
plan_refused 'src: .*avg.* of integers' 8 i32 'mesh=2 place=P(avg)' "$dst"
plan_refused 'dst: Partial(product)' 8 f32 "$src" 'mesh=2 place=P(product)'
plan_refused 'held by no source' 8 f32 'mesh=1 place=Explicit(0, 0-3)' "$dst"
refused '^tensorbus layout: --layout: mesh dim 0 shards dim 3' layout --shape 8 --layout 'mesh=2 place=S3'
refused '^tensorbus layout: --layout: ' layout --shape 8 --layout 'mesh=2 place=BlockShard(0,3)'
refused '^tensorbus layout: --layout: .*mixed' layout --shape 8 --layout 'mesh=2,2 place=P,P(min)'
refused '2^62' layout --shape 4611686018427387904 --dtype f32 --layout 'mesh=2 place=S0'

# the other arguments
plan_refused "--rank: 'one' is not a rank" 8 f32 "$src" "$dst" --rank one
plan_refused "--rank: '-1' is not a rank" 8 f32 "$src" "$dst" --rank -1
plan_refused "--rank: '1048576' is not a rank" 8 f32 "$src" "$dst" --rank 1048576
refused "--rank: '1x' is not a rank" layout --shape 8 --layout "$src" --rank 1x
plan_refused '--buckets: a bucket is at least 1 byte' 8 f32 "$src" "$dst" --buckets 0
plan_refused "--buckets: '16MX' is not a size such as .*30MB or 1.5GiB" 8 f32 "$src" "$dst" --buckets 16MX
plan_refused "--buckets: '1.5' is not a size" 8 f32 "$src" "$dst" --buckets 1.5
plan_refused '--hosts: expected a host number' 8 f32 "$src" "$dst" --hosts a
plan_refused '--hosts: expected a host number' 8 f32 "$src" "$dst" --hosts 0,0,
plan_refused '--hosts: expected a host number' 8 f32 "$src" "$dst" --hosts 0,-1
plan_refused '--hosts: unexpected' 8 f32 "$src" "$dst" --hosts '0,1;2'
plan_refused 'the host map covers 4 ranks, but rank 4 is in a mesh' 8 f32 "$src" "$dst" --hosts 0,0,1,1
plan_refused "can't write to .*: No such file" 8 f32 "$src" "$dst" --svg "$tmp/no/such/folder"
refused "can't write to .*: Is a directory" layout --shape 8 --layout "$src" --svg "$tmp"

finish
