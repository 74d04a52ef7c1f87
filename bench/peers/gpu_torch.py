"""What `tensorbus bench --gpu` measures, done with PyTorch.

A process has the sources on the GPU, and another one maps them through CUDA IPC and copies: slices into slices, for one
of four targets after the other. Quantisers are written with PyTorch's own operations.

    python3 gpu_torch.py ROUNDS LINE:SHAPES...

LINE is the name of a line, such as gpu_row_col, and SHAPES are those of its tensors, ROWSxCOLUMNS; of gpu_model, a list
in which +0 or +1 behind a shape is the dimension that its target cuts; of many equal tensors, COUNTxLENGTH.

Prints "LINE GB/s RATE against RATE" for each: medians over the rounds, by CUDA events, of that work and of one
contiguous copy_ of as many bytes, after two rounds that are not counted. Where sizes change, half of the bytes that are
read and written count. What the last round wrote is verified. What fails says "LINE failed: REASON".
"""

import statistics
import sys
import time

import torch
import torch.multiprocessing as multiprocessing

SIDE = 4
WARM_UP = 2
TIMEOUT_S = 120
LINE_S = 15  # rounds end then


def bits(shape, dtype):
    """Distinct bits, which are only copied."""
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.arange(count, dtype=torch.int64, device="cuda").to(whole).view(dtype).reshape(shape)


def values(shape, dtype):
    """Small numbers whose sums are exact."""
    return (torch.arange(shape[0] * shape[1], device="cuda") % 251 - 125).div(16).to(dtype).reshape(shape)


def same(a, b):
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return torch.equal(a.view(whole), b.to(a.device).view(whole))


class Line:
    """source(): what the other process has. prepare(source): targets. run(), is_right(), and the bytes that count."""

    dtype = torch.float32

    def __init__(self, shapes):
        self.shape = shapes[0][0]
        self.shapes = shapes
        self.nbytes = self.shape[0] * self.shape[1] * self.dtype.itemsize

    def source(self):
        return bits(self.shape, self.dtype)

    def prepare(self, source):
        self.theirs = source
        self.target = torch.zeros_like(source)

    def clear(self):
        self.target.zero_()

    def bands(self):
        rows = self.shape[0] // SIDE
        return [slice(s * rows, (s + 1) * rows) for s in range(SIDE)]

    def blocks(self):
        columns = self.shape[1] // SIDE
        return [slice(t * columns, (t + 1) * columns) for t in range(SIDE)]


class RowsToColumns(Line):
    target_dtype = torch.float32

    def prepare(self, source):
        self.theirs = source
        shape = (SIDE, self.shape[0], self.shape[1] // SIDE)
        self.target = torch.zeros(shape, dtype=self.target_dtype, device="cuda")

    def run(self):
        for block, part in zip(self.blocks(), self.target):
            for band in self.bands():
                part[band].copy_(self.theirs[band, block])

    def is_right(self):
        expected = self.source().reshape(self.shape[0], SIDE, -1).transpose(0, 1).contiguous()
        return same(self.target, expected.to(self.target_dtype))


class Cast(RowsToColumns):
    target_dtype = torch.bfloat16

    def __init__(self, shapes):
        super().__init__(shapes)
        self.nbytes = self.nbytes * 3 // 4

    def source(self):
        return values(self.shape, self.dtype)


class Replicate(Line):
    def __init__(self, shapes):
        super().__init__(shapes)
        self.nbytes *= SIDE

    def prepare(self, source):
        self.theirs = source
        self.target = torch.zeros((SIDE, *self.shape), dtype=self.dtype, device="cuda")

    def run(self):
        for part in self.target:
            for band in self.bands():
                part[band].copy_(self.theirs[band])

    def is_right(self):
        return all(same(part, self.source()) for part in self.target)


class Many(Line):
    def prepare(self, source):
        super().prepare(source)
        self.pieces = list(self.target.unbind(0)), list(source.unbind(0))

    def run(self):
        torch._foreach_copy_(*self.pieces)

    def is_right(self):
        return same(self.target, self.source())


class Model(Line):
    """Rows over 4 to two copies of a model that 2 ranks share."""

    dtype = torch.bfloat16

    def __init__(self, shapes):
        self.shapes = shapes
        self.nbytes = 0
        for shape, cut in shapes:
            whole = shape[0] * (shape[1] if len(shape) > 1 else 1) * self.dtype.itemsize
            self.nbytes += SIDE * whole if cut is None else SIDE // 2 * whole

    def source(self):
        return [bits(shape, self.dtype) for shape, _ in self.shapes]

    def prepare(self, source):
        self.theirs = source
        self.target = []
        for rank in range(SIDE):
            self.target.append([torch.zeros_like(self.part(t, cut, rank)) for t, (_, cut) in zip(source, self.shapes)])

    @staticmethod
    def part(tensor, cut, rank):
        return tensor if cut is None else tensor.chunk(2, cut)[rank % 2]

    def clear(self):
        for target in self.target:
            torch._foreach_zero_(target)

    def run(self):
        for rank, target in enumerate(self.target):
            for whole, part, (_, cut) in zip(self.theirs, target, self.shapes):
                part.copy_(self.part(whole, cut, rank))

    def is_right(self):
        whole = self.source()
        return all(
            same(part, self.part(tensor, cut, rank).contiguous())
            for rank, target in enumerate(self.target)
            for tensor, part, (_, cut) in zip(whole, target, self.shapes)
        )


class Partial(Line):
    dtype = torch.bfloat16

    def __init__(self, shapes):
        super().__init__(shapes)
        self.nbytes = self.nbytes * (SIDE + 1) // 2

    def source(self):
        return torch.stack([values(self.shape, self.dtype) for _ in range(SIDE)])

    def prepare(self, source):
        self.theirs = source
        self.target = torch.zeros(self.shape, dtype=self.dtype, device="cuda")

    def run(self):
        for band in self.bands():
            torch.sum(self.theirs[:, band], dim=0, out=self.target[band])

    def is_right(self):
        return same(self.target, values(self.shape, torch.float32).mul(SIDE).to(self.dtype))


class Transpose(Line):
    def prepare(self, source):
        self.theirs = source
        shape = (SIDE, self.shape[1], self.shape[0] // SIDE)
        self.target = torch.zeros(shape, dtype=self.dtype, device="cuda")

    def run(self):
        for band, part in zip(self.bands(), self.target):
            part.copy_(self.theirs[band].t())

    def is_right(self):
        whole = self.source()
        return all(same(part, whole[band].t().contiguous()) for band, part in zip(self.bands(), self.target))


class TransposeBf16(Transpose):
    dtype = torch.bfloat16


class ToHost(Line):
    def prepare(self, source):
        self.theirs = source
        self.target = torch.zeros(self.shape, dtype=self.dtype, pin_memory=True)

    def run(self):
        for band in self.bands():
            self.target[band].copy_(self.theirs[band], non_blocking=True)

    def is_right(self):
        return same(self.target.cuda(), self.source())


class ToGpu(ToHost):
    def prepare(self, source):
        self.theirs = source.cpu().pin_memory()
        self.target = torch.zeros_like(source)


class Quantiser(Line):
    dtype = torch.bfloat16

    def source(self):
        return values(self.shape, self.dtype)

    def prepare(self, source):
        self.theirs = source
        self.target = torch.zeros(self.shape, dtype=torch.float8_e4m3fn, device="cuda")

    def clear(self):
        self.target.view(torch.uint8).zero_()

    def run(self):
        self.scales = [self.quantise(self.theirs[band], self.target[band]) for band in self.bands()]

    def is_right(self):
        return all(
            bool((self.restore(self.target[band].float(), scale) - self.source()[band].float()).abs().max() < 0.5)
            for band, scale in zip(self.bands(), self.scales)
        )


class Mxfp8(Quantiser):
    def __init__(self, shapes):
        super().__init__(shapes)
        self.nbytes = (self.nbytes + self.nbytes // 2 + self.nbytes // 64) // 2

    def quantise(self, rows, out):
        blocks = rows.float().reshape(-1, 32)
        exponent = (blocks.abs().amax(1, keepdim=True) / 448).log2().ceil().clamp(-127, 127)
        out.copy_((blocks * torch.exp2(-exponent)).reshape(rows.shape))
        return (exponent + 127).to(torch.uint8)

    def restore(self, rows, scale):
        return (rows.reshape(-1, 32) * torch.exp2(scale.float() - 127)).reshape(rows.shape)


class Fp8Block(Quantiser):
    def __init__(self, shapes):
        super().__init__(shapes)
        self.nbytes = (self.nbytes + self.nbytes // 2 + self.nbytes // 8192) // 2

    def quantise(self, rows, out):
        blocks = rows.float().reshape(rows.shape[0] // 128, 128, rows.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        out.copy_((blocks / scale).reshape(rows.shape))
        return scale

    def restore(self, rows, scale):
        blocks = rows.reshape(rows.shape[0] // 128, 128, rows.shape[1] // 128, 128)
        return (blocks * scale).reshape(rows.shape)


LINES = {
    "gpu_row_col": RowsToColumns,
    "gpu_model": Model,
    "gpu_replicate": Replicate,
    "gpu_small": Many,
    "gpu_tiny": Many,
    "gpu_tiny_1m": Many,
    "gpu_rows4": RowsToColumns,
    "gpu_runs32": RowsToColumns,
    "gpu_cast": Cast,
    "gpu_mxfp8": Mxfp8,
    "gpu_fp8_block": Fp8Block,
    "gpu_partial": Partial,
    "gpu_transpose_f32": Transpose,
    "gpu_transpose_bf16": TransposeBf16,
    "gpu_to_host": ToHost,
    "host_to_gpu": ToGpu,
}


def parse(word):
    """ "gpu_model:64x32+0,32x64+1,32" """
    name, _, shapes = word.partition(":")
    out = []
    for shape in shapes.split(","):
        sizes, _, cut = shape.partition("+")
        out.append((tuple(int(n) for n in sizes.split("x")), int(cut) if cut else None))
    return name, LINES[name](out)


def offer(words, offers, taken):
    for word in words:
        source = parse(word)[1].source()
        torch.cuda.synchronize()
        offers.put(source)
        taken.get(timeout=TIMEOUT_S)
        del source


def seconds_of(work):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_of(line):
    """One contiguous copy of as many bytes."""
    on_host = isinstance(line, ToHost) and not isinstance(line, ToGpu), isinstance(line, ToGpu)
    target, source = (
        torch.zeros(line.nbytes, dtype=torch.uint8, device="cpu" if h else "cuda", pin_memory=h) for h in on_host
    )
    return lambda: target.copy_(source, non_blocking=True)


def measure(name, line, rounds):
    ours, theirs = [], []
    copy, deadline = copy_of(line), time.monotonic() + LINE_S
    for r in range(-WARM_UP, rounds):
        whole = seconds_of(copy)
        line.clear()
        parts = seconds_of(line.run)
        if r >= 0:
            theirs.append(whole)
            ours.append(parts)
        if ours and time.monotonic() > deadline:
            break
    if not line.is_right():
        raise RuntimeError("a wrong element arrived")
    rate = 1e-9 * line.nbytes
    print(f"{name} GB/s {rate / statistics.median(ours):.3f} against {rate / statistics.median(theirs):.3f}", flush=True)


def main():
    try:
        rounds, words = int(sys.argv[1]), sys.argv[2:]
        lines = [parse(word) for word in words]
    except (IndexError, KeyError, ValueError):
        sys.exit("usage: gpu_torch.py ROUNDS LINE:SHAPES...")
    if not torch.cuda.is_available():
        sys.exit("torch can't use a GPU here")
    context = multiprocessing.get_context("spawn")
    offers, taken = context.Queue(), context.Queue()
    sender = context.Process(target=offer, args=(words, offers, taken), daemon=True)
    sender.start()
    for i, (name, line) in enumerate(lines):
        source = offers.get(timeout=TIMEOUT_S)
        try:
            line.prepare(source)
            measure(name, line, rounds)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{name} failed: {str(error).splitlines()[0]}", flush=True)
        lines[i] = line = source = None
        torch.cuda.empty_cache()
        taken.put(name)
    sender.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
