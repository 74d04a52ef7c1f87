#!/bin/sh
# UCX does not listen on interfaces with a public address unless it is told to, and doctor says so. In a network
# namespace of its own, with interfaces that lead nowhere.
if [ "$1" != inside ]; then
    { [ "$(id -u)" -eq 0 ] && unshare --net --mount true; } 2>/dev/null || {
        echo 'skipped: network namespaces need root'
        exit 77
    }
    exec unshare --net --mount sh "$0" inside
fi

# Interfaces that lead nowhere, one of each kind.
make_interfaces() {
    mount -t sysfs sysfs /sys && ip link set lo up || return 1
    for name in private public; do
        ip link add "${name}0" type veth peer name "${name}1" && ip link set "${name}0" up && ip link set "${name}1" up ||
            return 1
    done
    ip address add 10.1.2.3/24 dev private0 && ip address add 203.0.113.5/24 dev public0
}
if ! make_interfaces; then
    echo 'skipped: interfaces can not be made here'
    exit 77
fi
failed=0
unset UCX_NET_DEVICES UCX_TLS

# said PATTERN: doctor says so.
said() {
    printf '%s\n' "$report" | grep -q "$1" && return
    printf "FAILED: doctor lacks '%s':\n%s\n" "$1" "$report"
    failed=1
}

report=$("$TENSORBUS" doctor 2>&1)
case $report in *'libucx'*) echo 'skipped: UCX is not installed' && exit 77 ;; esac
said '^ok  *transport ucx  *opens; for other hosts, too: tcp/private0[;]'
said '^ok  *transport ucx  *does not use interfaces with a public address: public0 (203.0.113.5)$'

# What is asked for is done, with a warning.
report=$(UCX_NET_DEVICES=public0 "$TENSORBUS" doctor 2>&1)
said '^ok  *transport ucx  *opens; for other hosts, too: tcp/public0'
said '^limited  *transport ucx  *listens at a public address: public0 (203.0.113.5)$'
said '^  *-> let UCX_NET_DEVICES name private interfaces only'

# Each range of private addresses, and its neighbours.
for address in 10.0.0.1 10.255.255.254 172.16.0.1 172.31.255.254 192.168.0.1 100.64.0.1 100.127.255.254 169.254.1.1; do
    ip address flush dev public0
    ip address add "$address/32" dev public0
    report=$("$TENSORBUS" doctor 2>&1)
    case $report in *'public address'*) echo "FAILED: $address counts as public" && failed=1 ;; esac
done
for address in 9.255.255.255 11.0.0.1 172.15.255.255 172.32.0.1 192.167.255.255 100.63.255.255 100.128.0.1 169.253.1.1; do
    ip address flush dev public0
    ip address add "$address/32" dev public0
    report=$("$TENSORBUS" doctor 2>&1)
    said "does not use interfaces with a public address: public0 ($address)"
done
exit "$failed"
