"""What `tensorbus bench` measures as tiny, done with a loop of PyTorch's slice copies.

Four processes have all tensors of a source in shared memory, and each copies them to its own, slice by slice.

    python3 tiny_torch.py COUNT NBYTES ROUNDS

Prints "GB/s RATE", the median over the rounds, after one that is not counted. The last round is verified.
"""

import statistics
import sys
import time

import torch
import torch.multiprocessing as multiprocessing

SIDE = 4
WARM_UP = 1
TIMEOUT_S = 120


def run(index, source, count, length, rounds, barrier, times):
    torch.set_num_threads(1)
    target = torch.full_like(source, -1)
    for r in range(WARM_UP + rounds):
        if r == WARM_UP + rounds - 1:
            target.fill_(-1)
        barrier.wait(TIMEOUT_S)
        start = time.monotonic()
        for i in range(0, count * length, length):
            target[i : i + length].copy_(source[i : i + length])
        times[r, index] = time.monotonic() - start
        barrier.wait(TIMEOUT_S)
    if not torch.equal(target, source):
        sys.exit("tiny_torch: a wrong element arrived")


def main():
    try:
        count, nbytes, rounds = map(int, sys.argv[1:])
    except ValueError:
        sys.exit("usage: tiny_torch.py COUNT NBYTES ROUNDS")
    length = nbytes // 4
    source = torch.arange(count * length, dtype=torch.int32).share_memory_()
    times = torch.zeros(WARM_UP + rounds, SIDE, dtype=torch.float64).share_memory_()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(SIDE)
    multiprocessing.spawn(run, (source, count, length, rounds, barrier, times), nprocs=SIDE)
    seconds = times[WARM_UP:].max(1).values.tolist()
    print(f"GB/s {1e-9 * SIDE * count * nbytes / statistics.median(seconds):.4f}", flush=True)


if __name__ == "__main__":
    main()
