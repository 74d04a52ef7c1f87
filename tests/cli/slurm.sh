#!/bin/sh
# The Slurm script of docs/clusters.md, word for word, with stand-ins for Slurm and for the program: whoever comes first
# serves the store, and the job's status is the program's.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

docs=$(dirname -- "$0")/../../docs
sed -n '/^#!\/bin\/bash$/,/^```$/p' "$docs/clusters.md" | sed '$d' >"$tmp/job"
grep -q '^srun ' "$tmp/job" || fail "clusters.md has no Slurm script: $(cat "$tmp/job")"

# A port that is free, as the script works it out of the job's number; this shell's number makes that one of its own.
port=$(python3 -B - <<'PYTHON'
import random, socket
while True:
    port = random.randrange(20000, 32000)
    try:
        socket.create_server(("127.0.0.1", port)).close()
        print(port)
        break
    except OSError:
        pass
PYTHON
)
SLURM_JOB_ID=$(($$ * 20000 + port - 20000))
export SLURM_JOB_ID SLURM_JOB_NODELIST=nodes TENSORBUS tmp port

mkdir "$tmp/bin" "$tmp/home"
ln -s "$TENSORBUS" "$tmp/bin/tensorbus"
cat >"$tmp/bin/scontrol" <<'STANDIN'
#!/bin/sh
echo 127.0.0.1
STANDIN
# The step with the store begins when an agent serves it already.
cat >"$tmp/bin/srun" <<'STANDIN'
#!/bin/bash
if [ "$1" = --overlap ]; then
    shift 7
    for ((try = 0; try < 600; try++)); do
        (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        sleep 0.1
    done
    echo $$ >"$tmp/store_pid"
    exec "$@" 2>"$tmp/store_said"
fi
status=0
for rank in 0 1 2; do
    SLURM_PROCID=$rank SLURM_NTASKS=3 "$@" &
    steps+=($!)
done
for step in "${steps[@]}"; do
    wait "$step" || status=$?
done
exit "$status"
STANDIN
# train.py --agent SOCKET: ends when its agent answers and the store has said something; rank 1 without luck.
cat >"$tmp/bin/python" <<'STANDIN'
#!/bin/bash
for ((try = 0; try < 600; try++)); do
    [ -s "$tmp/store_said" ] && tensorbus status --socket "$3" --token-file "$TOKEN" >/dev/null 2>&1 && break
    sleep 0.1
done
[ "$try" -lt 600 ] || exit 4
[ "$SLURM_PROCID" -ne 1 ] || exit 3
STANDIN
chmod +x "$tmp/bin"/*

HOME=$tmp/home PATH=$tmp/bin:$PATH bash "$tmp/job" >"$out" 2>"$err" </dev/null
status=$?
expect_status 3 'the job'
grep -q 'another process serves it; waiting' "$tmp/store_said" ||
    fail "the store does not wait for its turn: $(cat "$tmp/store_said")"
[ -z "$(ls -A "$tmp/home")" ] || fail "the token is left"
tries=0
while kill -0 "$(cat "$tmp/store_pid")" 2>/dev/null && [ "$tries" -lt 600 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
[ "$tries" -lt 600 ] || fail "the store is left"

finish
