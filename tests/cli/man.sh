#!/bin/sh
# Man pages: the build has one for each command, and each tells what the help does.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

pages=$(dirname -- "$TENSORBUS")/man

accepted help
commands=$(sed -n 's/^  \([a-z][a-z]*\)  *[a-z].*/\1/p' "$out" | grep -vx help)
[ "$(printf '%s\n' "$commands" | wc -l)" -ge 8 ] || fail "only these commands were found: $commands"

accepted help --man
cp "$out" "$tmp/overview"
cmp -s "$tmp/overview" "$pages/tensorbus.1" || fail "tensorbus.1 is not what help --man prints"
[ "$(find "$pages" -name '*.1' | wc -l)" -eq $(($(printf '%s\n' "$commands" | wc -l) + 1)) ] ||
    fail "pages: $(ls "$pages")"
for variable in TENSORBUS_LOG TENSORBUS_BUCKET_SIZE TENSORBUS_STAGING_BYTES TENSORBUS_MAX_IN_FLIGHT \
    TENSORBUS_PLAN_BYTES TENSORBUS_STORE TENSORBUS_INDEX; do
    grep -q "$variable" "$tmp/overview" || fail "tensorbus.1 does not tell of $variable"
done

for command in $commands; do
    grep -q "^\.BR tensorbus..$command (1)\$" "$tmp/overview" || fail "tensorbus.1 does not tell of $command"
    accepted help "$command"
    cp "$out" "$tmp/help"
    accepted help --man "$command"
    cmp -s "$out" "$pages/tensorbus-$command.1" || fail "tensorbus-$command.1 is not what help --man $command prints"
    printed "^\.TH TENSORBUS..$(printf '%s' "$command" | tr '[:lower:]' '[:upper:]') 1 "
    printed "^tensorbus..$command .. [a-z]"
    for section in NAME SYNOPSIS DESCRIPTION OPTIONS 'EXIT STATUS' ENVIRONMENT 'SEE ALSO'; do
        printed "^\.SH $section\$"
    done
    told=$(grep -c '^\\fB\\-\\-' "$out")
    [ "$told" -eq "$(grep -c '^  --' "$tmp/help")" ] || fail "the page of $command has $told options: $(cat "$tmp/help")"
done

# what roff would take for its own
accepted help --man plan
printed '^  tensorbus plan \\-\\-shape 4096,4096 .* \\(rs$'
printed '\\(aqmesh=4 place=S0\\(aq'

refused "there is no command 'nothing'" help --man nothing
refused "help takes one command, but 'b' follows 'plan'" help --man plan b

finish
