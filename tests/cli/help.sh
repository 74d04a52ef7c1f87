#!/bin/sh
# Help: every way to ask for it; every option is in it, and every option in it is known.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

accepted --help
cp "$out" "$tmp/overview"
for command in layout plan inspect reshard verify spec diff store config doctor demo bench agent status top; do
    printed "^  $command  *[a-z]"
done
accepted
cmp -s "$tmp/overview" "$out" || fail "tensorbus alone does not show the overview"
accepted help
cmp -s "$tmp/overview" "$out" || fail "tensorbus help does not show the overview"

accepted --version
head -n 1 "$out" | grep -q '^tensorbus [0-9][0-9]*\.[0-9][0-9]*\.[0-9][0-9]*$' || fail "the version: $(head -n 1 "$out")"
lines 6
printed '^devices  .* host'
printed '^transports  self shm ucx'
printed '^linked  *jansson [0-9.]*, libmicrohttpd [0-9.]*$'

# has COMMAND OPTION...: the help of the command tells of these options, and of no others
has() {
    command=$1
    shift
    accepted "$command" --help
    cp "$out" "$tmp/help"
    accepted help "$command"
    cmp -s "$tmp/help" "$out" || fail "help $command is not $command --help"
    accepted "$command" -h
    cmp -s "$tmp/help" "$out" || fail "$command -h is not $command --help"
    printed "^usage: tensorbus $command"
    for option in "$@" help; do
        printed "^  --${option}[ ]"
    done
    told=$(grep -c '^  --' "$tmp/help")
    [ "$told" -eq $(($# + 1)) ] || fail "the help of $command has $told options instead of $(($# + 1))"
    for option in "$@"; do
        run "$command" "--$option=" "--$option="
        expect_status 2 "$command --$option= twice"
        ! grep -q unknown "$err" || fail "$command: --$option is in the help, but unknown"
    done
    awk -v command="$command" 'length($0) > 110 { print command ": a long line: " $0; long = 1 } END { exit long }' \
        "$tmp/help" || fail "the help of $command has long lines"
}
has layout shape layout dtype rank all json svg jsonl
has plan shape dtype src dst spec in bandwidth hosts rank buckets all json svg html jsonl
has inspect json token-file
has verify hashes spec threads json
has reshard spec in out hf max-file-size memory threads verify trust-replicas ignore-unindexed sync dry-run json \
    tensors-only to tp pp ep from-form from-tp from-pp from-ep
has spec from to tp pp ep from-form from-tp from-pp from-ep
has diff spec atol rtol all json
has store listen token-file insecure wait
has config json
has doctor store token-file json
has demo size ranks src dst staged checksum bus gpu
has bench only rounds size staged checksum peers hosts check json gpu transport between store token-file
has agent name rank size store socket token-file timeout workers transport host checksum no-gpu http
has dashboard store socket listen token-file
has run groups store token-file no-agents
has status store socket all token-file timeout watch interval json
has top socket interval once token-file

# help needs no sound environment, and comes whatever else is asked for
export TENSORBUS_LOG=loud
accepted plan --shape 8 --help
printed '^usage: tensorbus plan'
accepted --version

finish
