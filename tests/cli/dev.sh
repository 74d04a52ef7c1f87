#!/bin/sh
# ./dev build: when it configures, with programs that only tell how they were called in place of CMake and the others.
# shellcheck source=tests/cli/support.sh
. "$(dirname -- "$0")/support.sh"

source=$(cd -- "$(dirname -- "$0")/../.." && pwd -P)
tree=$tmp/tree
bin=$tmp/bin
mkdir "$tree" "$bin" "$tmp/modules" || exit 1
cp "$source/dev" "$source/CMakePresets.json" "$tree"

# program NAME: a program that does what standard input says
program() {
    { echo '#!/bin/sh' && cat; } >"$bin/$1"
    chmod +x "$bin/$1"
}
program cmake <<END
echo "\$*" >>"$tmp/configured"
echo '-- tensorbus: without the CUDA device'
mkdir -p "build/\$2"
: >"build/\$2/build.ninja"
echo "CMAKE_HOME_DIRECTORY:INTERNAL=\$PWD" >"build/\$2/CMakeCache.txt"
END
program ninja <<END
echo "\$*" >>"$tmp/built"
echo 'ninja: no work to do.'
END
program dpkg-query <<'END'
shift 3
for package; do printf '<%s installed>' "$package"; done
END
program pkg-config <<END
[ "\$1" = --modversion ] && cat "$tmp/modules/\$2" 2>/dev/null
END

# configured N WHAT: `./dev build` was called; CMake must have been N times until now
configured() {
    if ! PATH=$bin:/usr/bin:/bin "$tree/dev" build >"$out" 2>"$err"; then
        fail "$2: $(cat "$err")"
    fi
    [ "$(wc -l <"$tmp/configured")" -eq "$1" ] || fail "$2: CMake was called with: $(cat "$tmp/configured")"
}

program python3 <<END
cat "$tmp/python_nvcc" 2>/dev/null
END

# Where the system's own MPIs are seen, too, they do not change.
configured 1 'the first build'
grep -q '^--preset release --fresh$' "$tmp/configured" || fail "CMake was called with: $(cat "$tmp/configured")"
grep -q '^build/release: without the CUDA device$' "$err" || fail "what was found is not told: $(cat "$err")"
configured 1 'the second build'
echo 4.1.4 >"$tmp/modules/ompi-c"
program mpirun.openmpi </dev/null
configured 2 'an MPI was installed'
grep -q '^--preset release -U mpi_\* ' "$tmp/configured" || fail "CMake was called with: $(cat "$tmp/configured")"
configured 2 'the MPI is still there'
echo 4.1.6 >"$tmp/modules/ompi-c"
configured 3 'the MPI was replaced'
echo 4.0 >"$tmp/modules/mpich"
configured 4 'another was installed'
rm "$tmp/modules/ompi-c" "$bin/mpirun.openmpi"
: >"$tmp/built"
configured 5 'one was removed'
[ "$(head -n 1 "$tmp/built")" = '-C build/release -t cleandead' ] || fail "its library stays: $(cat "$tmp/built")"
configured 5 'nothing has changed'
program nvcc </dev/null
configured 6 'nvcc was installed'
rm "$tree/build/release/optional" # a folder that an earlier ./dev has configured
configured 7 'it is not known what was there'
echo /site-packages/nvidia/cu13/bin/nvcc >"$tmp/python_nvcc"
configured 8 'nvcc was installed from PyPI'
grep -q -e '-U TB_NVCC' "$tmp/configured" || fail "CMake was called with: $(cat "$tmp/configured")"
configured 8 'nvcc of PyPI is still there'
rm "$tmp/python_nvcc"
configured 9 'nvcc of PyPI was removed'

finish
