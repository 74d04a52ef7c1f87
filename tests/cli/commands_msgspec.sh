#!/bin/sh
# Etha's commands, by msgspec, which is installed once, in a virtual environment beside the tool.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

skip() {
    echo "SKIP: $*"
    exit 77
}

venv=$(dirname -- "$TENSORBUS")/msgspec
if ! "$venv/bin/python" -c 'import msgspec' 2>/dev/null; then
    rm -rf "$venv"
    python3 -m venv "$venv" >"$out" 2>&1 || skip "no virtual environment: $(tail -n 1 "$out")"
    "$venv/bin/python" -m pip install --quiet --retries 1 --timeout 20 'msgspec==0.*' >"$out" 2>&1 ||
        skip "no msgspec, perhaps because no package registry can be reached: $(tail -n 1 "$out")"
fi
mkdir "$tmp/agents"
"$venv/bin/python" -B "$(dirname -- "$0")/commands.py" "$TENSORBUS" "$tmp/agents" --msgspec >"$out" 2>&1 ||
    fail "$(cat "$out")"

finish
