#!/bin/bash
# The test bed itself: hosts that reach one another, links that are cut, slow or lossy, and nothing left behind.
# shellcheck source=tests/hosts/support.sh
. "$(dirname -- "$0")/support.sh"

# Sends so many bytes from one host to another, and prints the milliseconds until they are acknowledged; "no" if
# nothing comes of it in time.
cat >"$tmp/send.py" <<'PYTHON'
import os, socket, subprocess, sys, time
source, target, address, nbytes, seconds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
bed = os.environ["BED"]
receive = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
peer = server.accept()[0]
left = int(sys.argv[1])
while left > 0:
    left -= len(peer.recv(min(left, 65536))) or left
peer.sendall(b"k")
"""
send = """
import socket, sys, time
start = time.monotonic()
try:
    peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[4]))
    peer.settimeout(float(sys.argv[4]))
    peer.sendall(bytes(int(sys.argv[3])))
    print(int((time.monotonic() - start) * 1000) if peer.recv(1) == b"k" else "no")
except OSError:
    print("no")
"""
def on(host, *command):
    return subprocess.Popen([bed, "exec", host, sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
receiver = on(target, receive, str(nbytes))
port = receiver.stdout.readline().strip()
sender = on(source, send, address, port, str(nbytes), str(seconds))
print(sender.communicate()[0].strip())
receiver.kill()
PYTHON

# sends FROM TO BYTES SECONDS
sends() {
    local address=BED_ADDR_$2
    python3 -B "$tmp/send.py" "$1" "$2" "${!address}" "$3" "$4"
}

# reaches FROM TO, unreached FROM TO
reaches() {
    [ "$(sends "$1" "$2" 1000 20)" != no ] || fail "$3: host $1 does not reach host $2"
}
unreached() {
    [ "$(sends "$1" "$2" 1000 1)" = no ] || fail "$3: host $1 reaches host $2"
}

# ---- Hosts

[ "$BED_NHOSTS" -eq 3 ] || fail "BED_NHOSTS is $BED_NHOSTS"
[ "$("$BED" exec 2 hostname)" = "$BED_HOST_2" ] || fail "host 2 does not know its name"
[ "$("$BED" exec "$BED_HOST_1" hostname)" = "$BED_HOST_1" ] || fail "a host is not found by its name"
[ "$(hostname)" != "$BED_HOST_2" ] || fail "this machine was renamed"
! "$BED" exec 3 true 2>/dev/null || fail "host 3 of 3 is there"
! "$BED" exec tbbed-1-0 true 2>/dev/null || fail "a host of another bed is there"
"$BED" exec 0 sh -c 'exit 7'
[ $? -eq 7 ] || fail "the status of a host's command is lost"
reaches 0 1 'at first'
reaches 2 0 'at first'

before=$("$BED" sent 0)
sends 0 1 1000000 20 >/dev/null
sent=$(($("$BED" sent 0) - before))
[ "$sent" -ge 1000000 ] || fail "host 0 has sent a million bytes, of which $sent are counted"

# ---- Links

"$BED" cut 1
unreached 0 1 'host 1 is unplugged'
reaches 0 2 'host 1 is unplugged'
"$BED" mend 1
reaches 0 1 'host 1 is plugged in again'

if "$BED" part 0 1; then
    unreached 0 1 'hosts 0 and 1 are parted'
    reaches 0 2 'hosts 0 and 1 are parted'
    reaches 1 2 'hosts 0 and 1 are parted'
    "$BED" join 0 1
    reaches 0 1 'hosts 0 and 1 are joined again'
else
    printf 'not tested: parted hosts\n'
fi

# What can't be meant is wrong: neither the kernel's fault, nor a reason to skip.
# wrong WORD ARG...: bed ARG... fails with 1 and says WORD.
wrong() {
    local word=$1 said status
    shift
    said=$("$BED" "$@" 2>&1)
    status=$?
    { [ "$status" -eq 1 ] && [[ $said = *"$word"* ]]; } || fail "bed $*: exit status $status: $said"
}
wrong "'00' is no host" exec 00 true
for rate in fast 1mbot 0 '' -1; do
    wrong "'$rate' is no rate" shape 0 "$rate"
done
for part in 200 100.1 1.2.3 . '' -1 5%; do
    wrong "'$part' is no percentage" drop 0 "$part"
done

# A million bytes take a second at this rate, less what may go at once; no machine is too fast for that.
"$BED" shape 0 8mbit || fail "shape"
ms=$(sends 0 1 1000000 60)
{ [ "$ms" != no ] && [ "$ms" -ge 500 ]; } || fail "a million bytes at 8 Mbit/s: $ms ms"
"$BED" shape 0 off
reaches 0 1 'as fast as it can'

"$BED" drop 1 100
status=$?
if [ "$status" -eq 77 ]; then
    printf 'not tested: dropped packets\n'
else
    [ "$status" -eq 0 ] || fail "drop: exit status $status"
    unreached 0 1 'host 1 loses everything'
    "$BED" drop 1 5
    [ "$(sends 0 1 1000000 60)" != no ] || fail "nothing gets through, although only 5% are lost"
    "$BED" drop 1 0
    reaches 0 1 'host 1 loses nothing any more'
fi

# ---- Beds

# inner ARG...: a bed of its own, as if this were none.
inner() {
    env -u BED_NHOSTS "$BED" "$@"
}
left() {
    ip netns list | grep "^tbbed-$1-"
}
PATH=$PATH:/usr/sbin:/sbin

inner 1 -- sh -c 'exit 5'
[ $? -eq 5 ] || fail "the command's status is lost"
inner 0 -- true 2>/dev/null && fail "a bed of no hosts"
inner 02 -- true 2>/dev/null && fail "a bed of 02 hosts"
inner 2 true 2>/dev/null && fail "a bed without --"

# begin: a bed whose command, and one on its host, sleep. Sets $bed. A job of its own, because others ignore SIGINT.
begin() {
    set -m
    # shellcheck disable=SC2016 # the inner shell expands these
    env -u BED_NHOSTS "$BED" 1 -- bash -c '"$BED" exec 0 sleep 600 & echo ready >'"$tmp"'/ready; wait' &
    bed=$!
    set +m
    for ((try = 0; try < 300; try++)); do
        [ ! -e "$tmp/ready" ] || break
        sleep 0.1
    done
    rm "$tmp/ready" || fail "an inner bed does not start"
    left "$bed" >/dev/null || fail "an inner bed has no namespaces"
}

for signal in TERM INT HUP; do
    begin
    kill -s "$signal" "$bed"
    wait "$bed" 2>/dev/null
    status=$?
    [ "$status" -eq $((128 + $(kill -l "$signal"))) ] || fail "ended by SIG$signal: exit status $status"
    ! left "$bed" || fail "ended by SIG$signal: something is left"
done

# On a terminal: a bed heeds signals while its command runs, and leaves what is typed to the command.
cat >"$tmp/terminal.py" <<'PYTHON'
import os, pty, select, signal, sys, time
how, command = sys.argv[1], sys.argv[2:]
deadline = time.monotonic() + 60
pid, terminal = pty.fork()
if pid == 0:
    os.environ.pop("BED_NHOSTS")
    os.execv(os.environ["BED"], [os.environ["BED"], "1", "--", *command])
said, is_told, status = b"", False, None
while status is None and time.monotonic() < deadline:
    if select.select([terminal], [], [], 0.1)[0]:
        try:
            said += os.read(terminal, 4096)
        except OSError:
            pass
    if b"ready" in said and not is_told:
        is_told = True
        if how == "^C":
            os.write(terminal, b"\x03")
        elif how == "exit":
            os.write(terminal, b"exit 5\n")
        else:
            os.kill(pid, getattr(signal, "SIG" + how))
    ended, code = os.waitpid(pid, os.WNOHANG)
    if ended:
        status = os.waitstatus_to_exitcode(code)
print(pid, status)
if status is None:
    os.kill(pid, signal.SIGKILL)
PYTHON
# on_terminal HOW STATUS COMMAND...: the command says "ready", and then it happens; the bed ends with STATUS.
on_terminal() {
    local how=$1 expected=$2 pid status
    shift 2
    read -r pid status < <(python3 -B "$tmp/terminal.py" "$how" "$@")
    [ "$status" = "$expected" ] || fail "on a terminal, $how, $*: exit status $status"
    ! left "$pid" || fail "on a terminal, $how: something is left"
}
sleeps='echo ready; exec sleep 600'
on_terminal TERM 143 sh -c "$sleeps"
on_terminal HUP 129 sh -c "$sleeps"
on_terminal ^C 130 sh -c "$sleeps"
on_terminal ^C 9 bash -c 'trap "exit 9" INT; echo ready; while :; do sleep 0.1; done'
printf 'PS1=; echo ready\n' >"$tmp/bashrc"
on_terminal TERM 143 bash --rcfile "$tmp/bashrc" -i
on_terminal exit 5 bash --rcfile "$tmp/bashrc" -i

begin
kill -s KILL "$bed"
wait "$bed" 2>/dev/null
left "$bed" >/dev/null || fail "a bed that was killed has removed its hosts"
sleeper=$(ip netns pids "tbbed-$bed-0")
inner 1 -- true
! left "$bed" || fail "killed: the next bed does not sweep what is left"
for pid in $sleeper; do
    ! grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$pid/status" 2>/dev/null || fail "killed: process $pid is left"
done
ip netns list | grep -q "^$BED_HOST_0" || fail "the sweep has taken a bed that is in use"

finish
