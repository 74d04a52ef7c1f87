#!/bin/sh
# Installs the build in $BUILD into a temporary prefix and checks that a program outside the tree
# can be built against it, by pkg-config and by find_package, with the shared and with the static
# library; and an MPI program with each MPI in $MPIS that the build was made with. ctest sets the variables
# used here.
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
    "$CC" -std=c17 -Wall -Wextra -Wpedantic -Werror "$@"
}

# expect_ranks MPI PROGRAM: its four ranks say that all is right.
expect_ranks() {
    eval "launch=\$LAUNCH_$1"
    # shellcheck disable=SC2086,SC2154 # words that are meant to be split; set by eval
    if ! env LD_LIBRARY_PATH="$libs" $launch "$2" >"$work/log" 2>&1 ||
        [ "$(grep -c ', all right$' "$work/log")" -ne 4 ]; then
        printf '%s, with %s:\n' "$2" "$1" >&2
        cat "$work/log" >&2
        exit 1
    fi
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
grep -ho 'docs/[a-z/]*\.md' "$prefix"/share/man/man1/*.1 | sort -u >"$work/documents"
test -s "$work/documents"
while read -r document; do
    test -s "$prefix/share/doc/tensorbus/${document#docs/}"
done <"$work/documents"
if [ -n "$MPIS" ]; then
    "$prefix/bin/tensorbus" bench --hosts --only mpi_row_col --size 1MiB --rounds 1 --json >"$work/bench"
    if ! grep -q '"against":"MPI_Alltoallw"' "$work/bench"; then
        printf 'the installed bench: %s\n' "$(cat "$work/bench")" >&2
        exit 1
    fi
fi

export PKG_CONFIG_PATH="$libs/pkgconfig"
# shellcheck disable=SC2046 # the words are meant to be split
compile "$here/consumer.c" -o "$work/pc_shared" $("$PKG_CONFIG" --cflags --libs tensorbus)
expect_version env LD_LIBRARY_PATH="$libs" "$work/pc_shared"
# shellcheck disable=SC2046
compile "$here/consumer.c" -o "$work/pc_static" -static $("$PKG_CONFIG" --static --cflags --libs tensorbus)
expect_version "$work/pc_static"
for mpi in $MPIS; do
    # shellcheck disable=SC2046
    compile "$EXAMPLES/mpi.c" -o "$work/pc_$mpi" $("$PKG_CONFIG" --cflags --libs "tensorbus-mpi-$mpi")
    expect_ranks "$mpi" "$work/pc_$mpi"
done

quietly "$CMAKE" -S "$here" -B "$work/build" -G "$GENERATOR" -DCMAKE_C_COMPILER="$CC" \
    -DCMAKE_PREFIX_PATH="$prefix" -DVERSION="$VERSION" -DMPIS="$(printf '%s' "$MPIS" | tr ' ' ';')" -DEXAMPLES="$EXAMPLES"
quietly "$CMAKE" --build "$work/build"
expect_version "$work/build/consumer_shared"
expect_version "$work/build/consumer_static"
for mpi in $MPIS; do
    expect_ranks "$mpi" "$work/build/consumer_$mpi"
done

# A component that there is none of is named.
mkdir "$work/wrong"
cat >"$work/wrong/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(wrong LANGUAGES C)
find_package(tensorbus REQUIRED COMPONENTS shared mpi)
CMAKE
if "$CMAKE" -S "$work/wrong" -B "$work/wrong/build" -G "$GENERATOR" -DCMAKE_C_COMPILER="$CC" \
    -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 || ! tr -s ' \n' ' ' <"$work/log" | grep -q "has no component 'mpi'"; then
    printf 'find_package of a component that is none:\n' >&2
    cat "$work/log" >&2
    exit 1
fi
