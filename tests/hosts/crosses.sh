#!/bin/bash
# crosses.sh COMMAND [ARG...]: the command has to succeed, and every host to have sent something to others meanwhile.
set -u
: "${BED:?to be run by tests/hosts/bed N -- bash THIS COMMAND}"
enough=100000 # more than is said in order to meet

"$@"
status=$?
[ "$status" -eq 0 ] || exit "$status"
for ((host = 0; host < BED_NHOSTS; host++)); do
    sent=$("$BED" sent "$host")
    printf 'host %d has sent %s bytes\n' "$host" "$sent"
    [ "$sent" -ge "$enough" ] || status=1
done
[ "$status" -eq 0 ] || printf 'FAILED: not all hosts have sent %s bytes\n' "$enough"
exit "$status"
