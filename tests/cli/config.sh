#!/bin/sh
# tensorbus config: what is in force, where it comes from, and what is refused.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

accepted config
lines 16
printed '^log  *TENSORBUS_LOG  *warn  *default  [a-z]'
printed '^bucket_size  *TENSORBUS_BUCKET_SIZE  *16MiB  *default  [a-z]'
printed '^staging_bytes  *TENSORBUS_STAGING_BYTES  *256MiB  *default  [a-z]'
printed '^max_in_flight  *TENSORBUS_MAX_IN_FLIGHT  *2  *default  [a-z]'
printed '^plan_bytes  *TENSORBUS_PLAN_BYTES  *64MiB  *default  [a-z]'

TENSORBUS_LOG=info TENSORBUS_BUCKET_SIZE=1000 TENSORBUS_STAGING_BYTES=2g accepted config
printed '^log  *TENSORBUS_LOG  *info  *environment '
printed '^bucket_size  *TENSORBUS_BUCKET_SIZE  *1000  *environment '
printed '^staging_bytes  *TENSORBUS_STAGING_BYTES  *2GiB  *environment '
printed '^max_in_flight  *TENSORBUS_MAX_IN_FLIGHT  *2  *default '

TENSORBUS_MAX_IN_FLIGHT=5 accepted config --json
lines 1
printed '^\[{"name":"log","env":"TENSORBUS_LOG","value":"warn","source":"default","help":"'
printed '{"name":"bucket_size","env":"TENSORBUS_BUCKET_SIZE","value":16777216,"source":"default",'
printed '{"name":"max_in_flight","env":"TENSORBUS_MAX_IN_FLIGHT","value":5,"source":"environment",'
printed '{"name":"plan_bytes","env":"TENSORBUS_PLAN_BYTES","value":67108864,"source":"default",.*}\]$'
printed '{"name":"store","env":"TENSORBUS_STORE","value":"","source":"default",'

TENSORBUS_COPY=portable accepted config
printed '^copy  *TENSORBUS_COPY  *portable  *environment '

TENSORBUS_STORE=tcp://node0:7000 TENSORBUS_INDEX=3 accepted config
printed '^store  *TENSORBUS_STORE  *tcp://node0:7000  *environment '
printed '^index  *TENSORBUS_INDEX  *3  *environment '
printed '^group  *TENSORBUS_GROUP  *default '

for command in config demo; do
    TENSORBUS_LOG=loud refused "^tensorbus $command: TENSORBUS_LOG in the environment: 'loud'" $command
    TENSORBUS_BUCKET_SIZE=0 refused 'TENSORBUS_BUCKET_SIZE in the environment: it must be at least 1' $command
    TENSORBUS_STAGING_BYTES=lots refused "TENSORBUS_STAGING_BYTES in the environment: 'lots'" $command
    TENSORBUS_COPY=fast refused 'TENSORBUS_COPY in the environment: .fast. is no way of copying that this machine has: auto, ' $command
    TENSORBUS_MAX_IN_FLIGHT=-1 refused 'TENSORBUS_MAX_IN_FLIGHT in the environment' $command
done

# the log goes to standard error
run layout --shape 8 --layout 'mesh=2 place=S0' --svg "$tmp/picture.svg"
[ ! -s "$err" ] || fail "logs without being asked: $(cat "$err")"
export TENSORBUS_LOG=info
run layout --shape 8 --layout 'mesh=2 place=S0' --svg "$tmp/picture.svg"
expect_status 0 'layout with TENSORBUS_LOG=info'
grep -q '^tensorbus: info: wrote .*/picture.svg, [0-9]* bytes$' "$err" || fail "no info message: $(cat "$err")"

finish
