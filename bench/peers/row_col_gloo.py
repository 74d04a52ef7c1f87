"""What `tensorbus bench` measures as row_col, done with torch.distributed over Gloo.

Ranks 0 to 3 hold bands of rows of a matrix of floats, and ranks 4 to 7 get blocks of its columns. Gloo sends memory
without gaps only, so a source packs each target's part; a target receives every band where it belongs.

    python3 row_col_gloo.py ROWS COLUMNS ROUNDS

Prints "GB/s RATE", the median over the rounds, after two that are not counted. The last round is verified.
"""

import datetime
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIDE = 4
WARM_UP = 2


def move(rank, index, data, band, block):
    if rank < SIDE:
        parts = [data[:, t * block : (t + 1) * block].contiguous() for t in range(SIDE)]
        works = [dist.isend(parts[(index + t) % SIDE], SIDE + (index + t) % SIDE) for t in range(SIDE)]
    else:
        works = [dist.irecv(data[s * band : (s + 1) * band], s) for s in range(SIDE)]
    for work in works:
        work.wait()


def verify(index, data, rows, columns, block):
    first = torch.arange(rows, dtype=torch.int64).unsqueeze(1) * columns
    for start in range(0, rows, 1024):
        stop = min(start + 1024, rows)
        expected = first[start:stop] + torch.arange(index * block, (index + 1) * block)
        if not torch.equal(data[start:stop].view(torch.int32), expected.to(torch.int32)):
            sys.exit("row_col_gloo: a wrong element arrived")


def run(rank, folder, rows, columns, rounds):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2 * SIDE,
        timeout=datetime.timedelta(seconds=120),
    )
    index, band, block = rank % SIDE, rows // SIDE, columns // SIDE
    if rank < SIDE:
        first = index * band * columns
        numbers = torch.arange(first, first + band * columns, dtype=torch.int64).to(torch.int32)
        data = numbers.view(torch.float32).reshape(band, columns)
    else:
        data = torch.zeros(rows, block)

    seconds = []
    for r in range(-WARM_UP, rounds):
        if r == rounds - 1 and rank >= SIDE:
            data.view(torch.int32).fill_(-1)
        dist.barrier()
        start = time.monotonic()
        move(rank, index, data, band, block)
        longest = torch.tensor([time.monotonic() - start], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if r >= 0:
            seconds.append(longest.item())

    if rank >= SIDE:
        verify(index, data, rows, columns, block)
    dist.barrier()  # all have verified
    if rank == 0:
        print(f"GB/s {1e-9 * 4 * rows * columns / statistics.median(seconds):.3f}", flush=True)
    dist.destroy_process_group()


def main():
    try:
        rows, columns, rounds = (int(word) for word in sys.argv[1:])
    except ValueError:
        sys.exit("usage: row_col_gloo.py ROWS COLUMNS ROUNDS")
    if rows < SIDE or columns < SIDE or rows % SIDE or columns % SIDE or rounds < 1:
        sys.exit("row_col_gloo: rows and columns must be multiples of 4, and rounds at least 1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            run, args=(folder, rows, columns, rounds), nprocs=2 * SIDE, start_method="fork"
        )


if __name__ == "__main__":
    main()
