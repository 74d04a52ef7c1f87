#!/bin/sh
# GPUs: what demo, bench and doctor say where there is none; and what they do with the fake driver, where it is built. It
# is no GPU, so ratios are left alone.
# shellcheck source=tests/cli/ranks.sh
. "$(dirname -- "$0")/ranks.sh"

# without PATTERN: one sentence that matches, and exit status 1, of demo and bench; doctor says the same, and goes on
without() {
    for command in demo bench; do
        run "$command" --gpu
        expect_status 1 "$command --gpu"
        grep -q -e "^tensorbus $command: $1" "$err" || fail "$command --gpu: expected '$1': $(cat "$err")"
        [ "$(wc -l <"$err")" -eq 1 ] || fail "$command --gpu: more than a sentence: $(cat "$err")"
        [ ! -s "$out" ] || fail "$command --gpu: printed $(cat "$out")"
    done
    accepted doctor
    printed "^limited  *CUDA  *no tensors in GPU memory: $1"
    grep -A 1 '^limited  *CUDA  ' "$out" | grep -q '^  *-> ' || fail "doctor: no remedy: $(cat "$out")"
    clean 'without a GPU'
}

if [ -z "${FAKE_CUDA-}" ]; then
    without 'this build has no CUDA device: '
    finish
fi

mkdir "$tmp/lib"
: >"$tmp/lib/libcuda.so.1"
LD_LIBRARY_PATH=$tmp/lib without 'there is no CUDA driver: '

LD_LIBRARY_PATH=$FAKE_CUDA
export LD_LIBRARY_PATH
FAKE_CUDA_WITHOUT=cuMemMap without 'the driver libcuda.so.1 is too old: it has no cuMemMap, '

FAKE_CUDA_GPUS=2 accepted doctor
printed '^ok  *CUDA  *driver for CUDA [0-9]*\.[0-9], 2 GPUs.*NVLink.* not tried'
printed '^ok  *cuda:1  *Fake GPU, GPU-[0-9a-f-]*, 8 GiB, compute capability 9\.0; CUDA IPC: yes; VMM: by descriptors$'
printed '^ok  *GPU peers  *1 of 1 pairs'
printed '^ok  *GPU copies  *1 MiB went to cuda:0 and came back$'
printed '^ok  *GPU sharing  .*ipc:\[.*pid:\['
FAKE_CUDA_NO_VMM=1 accepted doctor
printed '^limited  *cuda:0  .*VMM: no$'

accepted demo --gpu --size 1MiB --ranks 2,3
printed '^verified  all [0-9]* elements on 3 ranks, in each of 3 versions$'
printed '^memory    of cuda:0, Fake GPU$'
not_printed memcpy
clean 'demo --gpu'

names='gpu_row_col gpu_model gpu_replicate gpu_small gpu_tiny gpu_tiny_1m gpu_rows4 gpu_runs32 gpu_cast gpu_mxfp8
    gpu_fp8_block gpu_nvfp4 gpu_partial gpu_transpose_f32 gpu_transpose_bf16 gpu_to_host host_to_gpu'
accepted bench --gpu --size 2MiB --rounds 1 --json
lines 20
for name in $names; do
    printed "^{\"name\":\"$name\",.*\"gb_per_s\":[0-9.]*,\"ratio\":[0-9.]*,\"against\":\"cuMemcpyAsync.*\"at_least\":0.*,\"ok\":.*,\"wall_ratio\":[0-9.]*}"
done
printed '^{"name":"gpu_launches",.*"launches":[0-9.]*,"ratio":[0-9.]*,"against":"one",.*"at_most":4\.00,"ok":true}'
printed '^{"name":"gpu_latency",.*"us":[0-9.]*,"ratio":[0-9.]*,"against":"cuMemcpyAsync and a flag",'
printed '^{"name":"gpu_bus_model",.*"ratio":[0-9.]*,"against":"without agents",.*"at_least":0.95,'
clean 'bench --gpu'
TENSORBUS_UCX=$FAKE_UCX accepted bench --gpu --transport ucx --size 8MiB --rounds 1 --json
lines 1
printed '^{"name":"ucx_row_col",.*"ratio":[0-9.]*,"against":"contiguous, by ucx",.*"at_least":0.45,'
TENSORBUS_UCX=$FAKE_UCX UCX_TLS=tcp,cuda_copy accepted bench --gpu --transport ucx --size 2MiB --rounds 1 --json
printed '"at_least":0.90,'
clean 'bench --gpu --transport ucx'
TENSORBUS_NCCL=$FAKE_NCCL accepted bench --gpu --transport nccl --size 8MiB --rounds 1 --json
printed '^{"name":"nccl_row_col",.*"ratio":[0-9.]*,"against":"contiguous, by nccl"'
clean 'bench --gpu --transport nccl'
TENSORBUS_NVSHMEM=$FAKE_NVSHMEM accepted bench --gpu --transport nvshmem --size 8MiB --rounds 1 --json
printed '^{"name":"nvshmem_row_col",.*"ratio":[0-9.]*,"against":"contiguous, by nvshmem"'
clean 'bench --gpu --transport nvshmem'
TENSORBUS_NCCL=/nowhere/libnccl.so.2 run bench --gpu --transport nccl --size 8MiB --rounds 1
expect_status 1 'bench by an NCCL that is missing'
grep -q 'transport nccl needs NCCL .*/nowhere/libnccl.so.2' "$err" || fail "bench by an NCCL that is missing: $(cat "$err")"
refused "--transport is ucx, nccl or nvshmem, not 'shm'" bench --gpu --transport shm
TENSORBUS_UCX=$FAKE_UCX accepted doctor
printed '^limited  *transport ucx  *takes no memory of GPUs, which passes through host memory: it lacks cuda_copy, '
printed 'UCX [0-9.]*, .*libfake_ucx.so\|UCX [0-9.]*, .*libucp.so'
TENSORBUS_NCCL=$FAKE_NCCL accepted doctor
printed "^ok  *transport nccl  *memory of GPUs: NCCL 2\.30\.7, $FAKE_NCCL\$"
TENSORBUS_NCCL=$FAKE_NCCL FAKE_NCCL_VERSION=21803 accepted doctor
printed "^limited  *transport nccl  *this is too old: NCCL 2\.18\.3, $FAKE_NCCL\$"
TENSORBUS_NCCL=/nowhere/libnccl.so.2 accepted doctor
printed '^limited  *transport nccl  *there is no libnccl\.so\.2$'
printed '^  *-> pip install nvidia-nccl-cu13, '
TENSORBUS_NVSHMEM=/nowhere/libnvshmem_host.so.3 accepted doctor
printed '^ok  *transport nvshmem  *there is no NVSHMEM 3; only programs that name this transport need it$'
printed '^  *-> pip install nvidia-nvshmem-cu13, '
TENSORBUS_NVSHMEM=$FAKE_NVSHMEM accepted doctor
printed "^limited  *transport nvshmem  *NVSHMEM 3\.0\.0, $FAKE_NVSHMEM; to other hosts: nothing beside it; it lacks nvshmem_boot"
cp -L "$FAKE_NVSHMEM" "$tmp/libnvshmem_host.so.3"
: >"$tmp/nvshmem_bootstrap_uid.so.3"
: >"$tmp/nvshmem_transport_ibrc.so.7"
TENSORBUS_NVSHMEM=$tmp/libnvshmem_host.so.3 accepted doctor
printed "^ok  *transport nvshmem  *NVSHMEM 3\.0\.0, $tmp/libnvshmem_host.so.3; to other hosts: ibrc\$"
accepted bench --gpu --size 2MiB --rounds 2 --only gpu_cast
lines 2
printed '^gpu_cast  .*  cuMemcpyAsync, as many  .*  at least 0\.95  '

# What PyTorch takes: one program is told all the lines and their shapes, and its rates become lines of their own.
mkdir "$tmp/bin"
cat >"$tmp/bin/python3" <<'PROGRAM'
#!/bin/sh
[ "$1" != -c ] || exit 0
case $1 in */gpu_torch.py) ;; *) exit 3 ;; esac
[ "$2" = 1 ] || exit 4
shift 2
for word; do
    case $word in
    gpu_model:*) echo "${word%%:*} failed: out of memory" ;;
    gpu_small:4x16384) echo "${word%%:*} GB/s 5.5 against 11" ;;
    gpu_rows4:28x16388) ;;
    gpu_transpose_f32:*x8192) echo "${word%%:*} GB/s 3 against 12" ;;
    *) exit 5 ;;
    esac
done
PROGRAM
chmod +x "$tmp/bin/python3"
PATH=$tmp/bin:$PATH accepted bench --gpu --size 2MiB --rounds 1 --peers --json \
    --only gpu_model,gpu_small,gpu_rows4,gpu_transpose_f32
lines 8
printed '^{"name":"gpu_small_torch",.*"gb_per_s":5\.500,"ratio":0\.500,"against":"one copy_"'
printed '^{"name":"gpu_transpose_f32_torch",.*"ratio":0\.250,'
printed '^{"name":"gpu_model_torch",.*"not_measured":"gpu_model failed: out of memory"}'
printed '^{"name":"gpu_rows4_torch",.*"not_measured":"gpu_torch.py told no rate of it"}'

accepted demo --gpu --bus --size 1MiB --ranks 1,2
printed '^ *2  failed$'
printed '^verified  all [0-9]* elements on 2 ranks, in each of 3 versions$'
clean 'demo --gpu --bus'

refused "--only: 'gpu_cast' is measured with --gpu" bench --only gpu_cast
refused "--only: 'cast' is measured without --hosts, --gpu and --between" bench --gpu --only cast
refused '--hosts does not go with --gpu' bench --hosts --gpu
refused "--only: 'gpu_cast' is measured with --gpu" bench --gpu --transport ucx --only gpu_cast
refused '--transport goes with --gpu' bench --transport ucx

finish
