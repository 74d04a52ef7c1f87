"""What `tensorbus bench --gpu` measures as gpu_row_col or gpu_small, done with PyTorch.

A process has the sources on the GPU, and another one maps them through CUDA IPC and copies: slices of the bands of rows
into blocks of columns, for one of four targets after the other; or many tensors of 64 KiB, at once.

    python3 gpu_torch.py row_col ROWS COLUMNS ROUNDS
    python3 gpu_torch.py small COUNT 16384 ROUNDS

Prints "GB/s RATE against RATE": medians over the rounds, by CUDA events, of the copies and of one contiguous copy_ of as
many bytes, after two rounds that are not counted. The last round is verified.
"""

import statistics
import sys

import torch
import torch.multiprocessing as multiprocessing

SIDE = 4
WARM_UP = 2
TIMEOUT_S = 120


def numbers(start, stop):
    """Distinct bits as floats, which are only copied."""
    return torch.arange(start, stop, dtype=torch.int64, device="cuda").to(torch.int32).view(torch.float32)


def offer(queue, done, rows, columns):
    source = numbers(0, rows * columns).reshape(rows, columns)
    torch.cuda.synchronize()
    queue.put(source)
    done.wait(TIMEOUT_S)


def copy_row_col(source, target, rows, columns):
    band, block = rows // SIDE, columns // SIDE
    for t in range(SIDE):
        part = target.view(-1)[t * rows * block : (t + 1) * rows * block].view(rows, block)
        for s in range(SIDE):
            part[s * band : (s + 1) * band].copy_(source[s * band : (s + 1) * band, t * block : (t + 1) * block])


def copy_small(source, target, rows, columns):
    torch._foreach_copy_(list(target.unbind(0)), list(source.unbind(0)))


def expect_row_col(rows, columns):
    whole = numbers(0, rows * columns).reshape(rows, SIDE, columns // SIDE)
    return whole.transpose(0, 1).reshape(rows, columns)


def expect_small(rows, columns):
    return numbers(0, rows * columns).reshape(rows, columns)


def seconds_of(work):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def main():
    kinds = {"row_col": (copy_row_col, expect_row_col), "small": (copy_small, expect_small)}
    try:
        copy, expect = kinds[sys.argv[1]]
        rows, columns, rounds = (int(word) for word in sys.argv[2:])
    except (IndexError, KeyError, ValueError):
        sys.exit("usage: gpu_torch.py row_col|small ROWS COLUMNS ROUNDS")
    if not torch.cuda.is_available():
        sys.exit("torch can't use a GPU here")
    context = multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    sender = context.Process(target=offer, args=(queue, done, rows, columns))
    sender.start()
    source = queue.get(timeout=TIMEOUT_S)
    target = torch.zeros_like(source)
    ours, theirs = [], []
    for r in range(-WARM_UP, rounds):
        whole = seconds_of(lambda: target.copy_(source))
        target.zero_()
        parts = seconds_of(lambda: copy(source, target, rows, columns))
        if r >= 0:
            theirs.append(whole)
            ours.append(parts)
    is_right = torch.equal(target.view(torch.int32), expect(rows, columns).view(torch.int32))
    del source
    done.set()
    sender.join(TIMEOUT_S)
    if not is_right:
        sys.exit("gpu_torch: a wrong element arrived")
    rate = 1e-9 * 4 * rows * columns
    print(f"GB/s {rate / statistics.median(ours):.3f} against {rate / statistics.median(theirs):.3f}", flush=True)


if __name__ == "__main__":
    main()
