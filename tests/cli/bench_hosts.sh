#!/bin/sh
# tensorbus bench --hosts: between network namespaces, which are gone afterwards. Ratios are left alone, because tests
# share the machine.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" -ne 0 ]; then
    run bench --hosts
    expect_status 1 'without root'
    grep -q '^tensorbus bench: --hosts makes network namespaces, which takes root$' "$err" || fail "$(cat "$err")"
    printf 'the rest needs root: skipped\n'
    [ "$failures" -eq 0 ] || exit 1
    exit 77
fi
run doctor
if ! grep -q '^ok  *transport ucx ' "$out"; then
    printf 'nothing crosses hosts without UCX: skipped\n'
    exit 77
fi

# left: namespaces of the bed whose process is in $tmp/beds.
left() {
    ip netns list | grep "^tbbed-$(cat "$tmp/beds")-"
}

run bench --hosts --size 4MiB --rounds 2 --only net_row_col,net_replicate --json
if [ "$status" -ne 0 ] && grep -q "hosts can't be made here" "$err"; then
    cat "$err"
    exit 77
fi
expect_status 0 'bench --hosts'
lines 2
printed '^{"name":"net_replicate",.*"gb":[0-9.]*,"ratio":[0-9.]*,"against":"the matrix",.*"rounds":2,"at_most":1\.05,"ok":'
if command -v iperf3 >/dev/null; then
    printed '^{"name":"net_row_col",.*"gb_per_s":[0-9.]*,"ratio":[0-9.]*,"against":"iperf3",.*"rounds":2,"at_least":0\.85,"ok":'
    not_printed '"gb_per_s":0\.000'
else
    printed '^{"name":"net_row_col",.*"not_measured":"iperf3 is not installed: apt-get install iperf3"}$'
fi

# What leaves the host does not depend on how busy the machine is.
accepted bench --hosts --size 64MiB --rounds 1 --only net_replicate --check
printed '^net_replicate  .* GB  .*  at most 1\.05  ok$'

# A shell that warns of its locale, whatever it does, says nothing that is to be measured.
LC_ALL=xx_XX.UTF-8 accepted bench --hosts --size 4MiB --rounds 1 --only net_replicate,net_row_col
printed '^net_replicate  .* GB  '

# What was not measured has not reached its mark.
mkdir "$tmp/bin"
printf '#!/bin/sh\nexit 127\n' >"$tmp/bin/iperf3"
chmod +x "$tmp/bin/iperf3"
PATH=$tmp/bin:$PATH run bench --hosts --size 4MiB --rounds 1 --only net_row_col --check
expect_status 1 'a line that was not measured, with --check'
printed '^net_row_col: not measured: iperf3 is not installed'
grep -q '^tensorbus bench: 1 of 1 ratios miss their marks, 1 of which were not measured$' "$err" || fail "$(cat "$err")"

# Ended by a signal, it takes its hosts along.
"$TENSORBUS" bench --hosts --size 64MiB --rounds 1000 --only net_replicate >"$out" 2>"$err" </dev/null &
job=$!
tries=0
while ! pgrep -P "$job" -x bed >"$tmp/beds" && [ "$tries" -lt 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
sleep 1
kill -TERM "$job"
wait "$job"
status=$?
expect_status 143 'SIGTERM to bench --hosts'
[ -s "$tmp/beds" ] || fail 'no bed was seen'
[ -z "$(left)" ] || fail "SIGTERM: left behind: $(left)"

finish
