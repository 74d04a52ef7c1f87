#!/bin/sh
# Installs the build in $BUILD into a temporary prefix and checks that a program outside the tree
# can be built against it, by pkg-config and by find_package, with the shared and with the static
# library. ctest sets the variables used here.
set -eu

here=$(cd -- "$(dirname -- "$0")" && pwd)
# Not below $BUILD: pkg-config's output cannot be split into words where a path has spaces.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
libs=$prefix/$LIBDIR

quietly() {
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
}

compile() {
    "$CC" -std=c17 -Wall -Wextra -Wpedantic -Werror "$here/consumer.c" "$@"
}

expect_version() {
    printed=$("$@")
    if [ "$printed" != "$VERSION" ]; then
        printf '%s: printed "%s", not "%s"\n' "$*" "$printed" "$VERSION" >&2
        exit 1
    fi
}

quietly "$CMAKE" --install "$BUILD" --prefix "$prefix"
test -x "$prefix/bin/tensorbus"
test -s "$prefix/share/man/man1/tensorbus.1"
test -s "$prefix/share/man/man1/tensorbus-agent.1"
test -s "$prefix/share/tensorbus/systemd/tensorbus-agent@.service"

export PKG_CONFIG_PATH="$libs/pkgconfig"
# shellcheck disable=SC2046 # the words are meant to be split
compile -o "$work/pc_shared" $("$PKG_CONFIG" --cflags --libs tensorbus)
expect_version env LD_LIBRARY_PATH="$libs" "$work/pc_shared"
# shellcheck disable=SC2046
compile -o "$work/pc_static" -static $("$PKG_CONFIG" --static --cflags --libs tensorbus)
expect_version "$work/pc_static"

quietly "$CMAKE" -S "$here" -B "$work/build" -G "$GENERATOR" -DCMAKE_C_COMPILER="$CC" \
    -DCMAKE_PREFIX_PATH="$prefix" -DVERSION="$VERSION"
quietly "$CMAKE" --build "$work/build"
expect_version "$work/build/consumer_shared"
expect_version "$work/build/consumer_static"
