#!/bin/bash
# A host whose own name is loopback to itself, as Debian and Ubuntu set it up, and an address to others: a store that
# would be reached from nowhere else is refused, and the doctor tells on either host what it can know.
# shellcheck source=tests/hosts/support.sh
. "$(dirname -- "$0")/support.sh"
: "${TENSORBUS:?the tool to test}"

printf '127.0.0.1 localhost\n127.0.1.1 node0\n' >"$tmp/hosts0"
printf '127.0.0.1 localhost\n%s node0\n' "$BED_ADDR_0" >"$tmp/hosts1"

# on HOST COMMAND [ARG...]: with the host's /etc/hosts
on() {
    local host=$1
    shift
    # shellcheck disable=SC2016 # the inner shell expands these
    "$BED" exec "$host" unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$tmp/hosts$host" "$@"
}

# found STATE PATTERN REMEDY: what the doctor says of the store on its last call.
found() {
    { grep -q "^$1  *store  *$2" "$tmp/doctor" && grep -A 1 ' store  ' "$tmp/doctor" | grep -q "^  *-> $3"; } ||
        fail "expected '$1 store $2' and '$3': $(grep -A 1 ' store  ' "$tmp/doctor")"
}

if ! on 0 true; then
    printf "a host can't have an /etc/hosts of its own here: skipped\n"
    exit 77
fi
url=tcp://node0:7000
on 0 timeout 60 "$TENSORBUS" store --listen "$url" >"$tmp/out" 2>&1
grep -q "'node0' is 127.0.1.1 here, which no other host reaches; listen at tcp://0.0.0.0:7000" "$tmp/out" ||
    fail "a store that nobody reaches is served: $(cat "$tmp/out")"

# One that is told by number is taken at its word.
"$BED" exec 0 "$TENSORBUS" store --listen tcp://127.0.1.1:7000 >"$tmp/out" 2>&1 </dev/null &
store=$!
for ((try = 0; try < 600; try++)); do
    [ ! -s "$tmp/out" ] || break
    sleep 0.1
done
on 0 "$TENSORBUS" doctor --store "$url" >"$tmp/doctor" 2>&1
found ok "$url answers, at 127.0.1.1, which says nothing of other hosts" 'ask on another host, too'
on 1 "$TENSORBUS" doctor --store "$url" >"$tmp/doctor" 2>&1
found failed '.*refused, nobody listens there' 'start it: tensorbus store --listen tcp://0.0.0.0:PORT'
kill "$store"
wait "$store"

"$BED" exec 0 "$TENSORBUS" store --listen tcp://0.0.0.0:7000 --insecure >"$tmp/out" 2>&1 </dev/null &
store=$!
for ((try = 0; try < 600; try++)); do
    on 1 "$TENSORBUS" doctor --store "$url" >"$tmp/doctor" 2>&1 && break
    sleep 0.1
done
grep -q "^ok  *store  *$url answers\$" "$tmp/doctor" || fail "it is not reached: $(cat "$tmp/doctor")"

# Unplugged, it is silent, or there is no way to it.
"$BED" cut 0
on 1 "$TENSORBUS" doctor --store "$url" >"$tmp/doctor" 2>&1
found failed '' 'let its '
kill "$store"
wait "$store"

finish
