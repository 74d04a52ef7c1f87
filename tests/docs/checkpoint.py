"""Writes a safetensors file for the samples. usage: checkpoint.py [--seed N] FILE NAME:DTYPE:SIZE,SIZE,... ...

{A..B} in a name stands for the numbers from A to B. Elements are small numbers; equal names and seeds give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from math import prod
from pathlib import Path
from zlib import crc32

PATTERNS = {"f32": lambda x: struct.pack("<f", x), "bf16": lambda x: struct.pack("<f", x)[2:]}


def expand(name: str) -> list[str]:
    """The names for all numbers in braces."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", name)
    if not match:
        return [name]
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [full for n in numbers for full in expand(name[: match.start()] + str(n) + name[match.end() :])]


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("file", type=Path)
parser.add_argument("tensors", nargs="+")
options = parser.parse_args()

header: dict[str, object] = {"__metadata__": {"format": "pt"}}
data = b""
for words in options.tensors:
    pattern, dtype, sizes = words.split(":")
    shape = [int(size) for size in sizes.split(",")]
    for name in expand(pattern):
        first = crc32(name.encode()) + options.seed
        row = b"".join(PATTERNS[dtype]((first + i) % 61 / 16 - 2) for i in range(61))
        size = len(row) // 61
        begin = len(data)
        data += (row * (prod(shape) // 61 + 1))[: prod(shape) * size]
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [begin, len(data)]}
text = json.dumps(header).encode()
options.file.parent.mkdir(parents=True, exist_ok=True)
options.file.write_bytes(struct.pack("<Q", len(text)) + text + data)
