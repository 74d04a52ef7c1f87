#!/bin/sh
# Completion for shells: bash completes commands and options, and what is written for zsh and fish they can read.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

# completes EXPECTED WORD...: of the last word.
completes() {
    expected=$1
    shift
    # shellcheck disable=SC2016 # bash expands these
    found=$(bash -c '. "$0"; COMP_WORDS=(tensorbus "$@"); COMP_CWORD=$#; _tensorbus; echo "${COMPREPLY[*]}"' \
        "$tmp/bash" "$@")
    # shellcheck disable=SC2254 # a pattern
    case $found in $expected) ;; *) fail "$*: completed to '$found'" ;; esac
}

for shell in bash zsh fish; do
    accepted help --completion "$shell"
    cp "$out" "$tmp/$shell"
    grep -q reshard "$tmp/$shell" || fail "$shell does not know reshard"
    if command -v "$shell" >/dev/null; then
        "$shell" -n "$tmp/$shell" || fail "$shell can't read it"
    fi
done
completes plan pl
completes --shape plan --sh
completes layout help lay
completes '*agent *--version' ''
refused 'bash, zsh or fish' help --completion csh
refused 'bash, zsh or fish' help --completion
finish
