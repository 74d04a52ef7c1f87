#!/bin/sh
# What `./dev gpu` packs runs by itself, here on the fake driver: some quick tests, and the tool. $BUILD is the build
# folder; PATTERNs choose the tests.
set -u
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
failures=0

fail() {
    printf 'FAILED: %s\n' "$*"
    failures=$((failures + 1))
}

MOST_KIB=$((200 << 10)) # in this build every program has kernels of its own
export MOST_KIB
"$here/pack" "$BUILD" "$tmp/packed" >"$tmp/out" 2>&1 || fail "pack: $(cat "$tmp/out")"
grep -q ' tests; needs glibc [0-9.]* or newer' "$tmp/out" || fail "pack said $(cat "$tmp/out")"
"$here/pack" "$BUILD" "$tmp/packed" >"$tmp/out" 2>&1 || fail "a second time: $(cat "$tmp/out")"
mkdir "$tmp/other"
: >"$tmp/other/file"
! UCX_LIB=$tmp/other "$here/pack" "$BUILD" "$tmp/packed" >"$tmp/out" 2>&1 || fail 'pack: UCX_LIB has no UCX'
grep -q 'there is no libucp.so.0 in UCX_LIB' "$tmp/out" || fail "UCX_LIB: $(cat "$tmp/out")"
! NCCL_LIB=$tmp/other "$here/pack" "$BUILD" "$tmp/packed" >"$tmp/out" 2>&1 || fail 'pack: NCCL_LIB has no NCCL'
grep -q 'there is no libnccl.so.2 in NCCL_LIB' "$tmp/out" || fail "NCCL_LIB: $(cat "$tmp/out")"
! NVSHMEM_LIB=$tmp/other "$here/pack" "$BUILD" "$tmp/packed" >"$tmp/out" 2>&1 || fail 'pack: NVSHMEM_LIB has no NVSHMEM'
grep -q 'there is no libnvshmem_host.so.3 in NVSHMEM_LIB' "$tmp/out" || fail "NVSHMEM_LIB: $(cat "$tmp/out")"
! "$here/pack" "$BUILD" "$tmp/other" >"$tmp/out" 2>&1 || fail 'pack into a folder that is not its own'
[ -f "$tmp/other/file" ] || fail 'pack has removed what is not its own'
for name in libcuda.so.1 libc.so.6; do
    [ ! -e "$tmp/packed/lib/$name" ] || fail "a library of the system is packed: $name"
done

# As on another machine: nothing of the build can be used.
LD_LIBRARY_PATH=$tmp/driver
export LD_LIBRARY_PATH
mkdir "$tmp/driver"
cp -L "$BUILD/tests/fake_cuda/libcuda.so.1" "$BUILD/tests/fake_nccl/libnccl.so.2" "$tmp/driver"
"$tmp/packed/run" test "$@" >"$tmp/out" 2>&1 || fail "run test: $(cat "$tmp/out")"
grep -q '^[1-9][0-9]* passed, 0 failed$' "$tmp/out" || fail "run test said $(cat "$tmp/out")"
"$tmp/packed/run" doctor >"$tmp/out" 2>&1 || fail "run doctor: $(cat "$tmp/out")"
grep -q '^ok  *cuda:0 ' "$tmp/out" || fail "run doctor said $(cat "$tmp/out")"

# Tests that fail, take too long, or skip.
printf '#!/bin/sh\necho broken\nexit 3\n' >"$tmp/packed/tests/broken"
printf '#!/bin/sh\nsleep 60\n' >"$tmp/packed/tests/late"
printf '#!/bin/sh\nprintenv WHY\nexit 77\n' >"$tmp/packed/tests/absent"
chmod +x "$tmp/packed/tests/broken" "$tmp/packed/tests/late" "$tmp/packed/tests/absent"
printf '%s\n' 'x/broken 9 broken ' 'x/late 1 late ' 'x/absent 9 absent WHY=nothing' >>"$tmp/packed/tests/list"
! "$tmp/packed/run" test '^x/' >"$tmp/out" 2>&1 || fail 'run test: a test has failed, and the status is 0'
for line in 'failed   x/broken, exit status 3, ' '    broken' 'failed   x/late, exit status 124, ' \
    'skipped  x/absent: nothing' '0 passed, 2 failed'; do
    grep -q "^$line" "$tmp/out" || fail "run test: expected '$line': $(cat "$tmp/out")"
done
RUN_SECONDS=2 "$tmp/packed/run" test '^x/late' '^x/broken' >"$tmp/out" 2>&1 && fail 'run test: there was no time, and the status is 0'
grep -q '^failed   x/late, exit status 124, ' "$tmp/out" || fail "RUN_SECONDS: $(cat "$tmp/out")"
sed -i 's/^x.late 1 /x\/late 99 /' "$tmp/packed/tests/list"
RUN_SECONDS=1 "$tmp/packed/run" test '^x/late' '^x/broken' >"$tmp/out" 2>&1 && fail 'run test: there was no time, and the status is 0'
grep -q '^not run  x/broken: there is no time left' "$tmp/out" || fail "RUN_SECONDS: $(cat "$tmp/out")"

# A sanitizer that says what it was called with.
mkdir "$tmp/bin"
# shellcheck disable=SC2016 # it is expanded there
printf '#!/bin/sh\necho "$@" "cases $TB_CASES parts $TB_PARTS" >>"%s/calls"\n' "$tmp" >"$tmp/bin/compute-sanitizer"
chmod +x "$tmp/bin/compute-sanitizer"
PATH=$tmp/bin:$PATH "$tmp/packed/run" sanitize >"$tmp/out" 2>&1 || fail "run sanitize: $(cat "$tmp/out")"
grep -q '^3 passed, 0 failed$' "$tmp/out" || fail "run sanitize said $(cat "$tmp/out")"
for call in '--tool racecheck .*/tests/device/cuda/cuda_test cases  parts matrices,moves,checksums,quantised$' \
    '--tool memcheck .*/tests/bus/random_test_slow cases 50 parts $' \
    '--tool memcheck .*/tests/device/cuda/cuda_test cases  parts $'; do
    grep -q -- "$call" "$tmp/calls" || fail "run sanitize: no call $call: $(cat "$tmp/calls")"
done
! PATH=$tmp/bin:$PATH "$tmp/packed/run" sanitize nonsense >"$tmp/out" 2>&1 || fail 'run sanitize nonsense: the status is 0'

! "$tmp/packed/run" test 'no such test' >"$tmp/out" 2>&1 || fail 'run test: no test was run, and the status is 0'
! "$tmp/packed/run" nonsense >"$tmp/out" 2>&1 || fail 'run nonsense: the status is 0'

[ "$failures" -eq 0 ]
