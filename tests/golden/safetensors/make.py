"""Makes the files beside it with the official library: python3 -m pip install safetensors numpy; python3 make.py

Byte i of a tensor is (7 * i + length of its name in UTF-8) % 251.
"""
import json
import os

import numpy as np
from safetensors import TensorSpec, serialize_file

here = os.path.dirname(os.path.abspath(__file__))


def write(path, tensors, metadata=None):
    """tensors: {name: (dtype, shape, bytes)}; returns the bytes of data."""
    keep, specs, total = [], {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        data = ((7 * np.arange(nbytes) + len(name.encode())) % 251).astype(np.uint8)
        keep.append(data)
        specs[name] = TensorSpec(dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=nbytes)
        total += nbytes
    serialize_file(specs, os.path.join(here, path), metadata=metadata)
    return total


write(
    "every_dtype.safetensors",
    {
        "a.bool": ("bool", [3], 3),
        "a.u8": ("uint8", [5], 5),
        "a.u16": ("uint16", [2, 2], 8),
        "a.u32": ("uint32", [3], 12),
        "a.u64": ("uint64", [1], 8),
        "a.i8": ("int8", [1, 1, 1], 1),
        "a.i16": ("int16", [3], 6),
        "a.i32": ("int32", [2], 8),
        "a.i64": ("int64", [2], 16),
        "a.f16": ("float16", [4, 2], 16),
        "a.bf16": ("bfloat16", [2, 3], 12),
        "a.f32": ("float32", [], 4),
        "a.f64": ("float64", [1, 2], 16),
        "a.f8e4m3": ("float8_e4m3fn", [7], 7),
        "a.f8e5m2": ("float8_e5m2", [2, 2], 4),
        "a.e8m0": ("float8_e8m0fnu", [3, 1], 3),
        "a.f4": ("float4_e2m1fn_x2", [2, 2], 4),
        "b.f32": ("float32", [0, 4], 0),
        "b.f16": ("float16", [1], 2),
    },
    {"format": "pt"},
)
write(
    "names.safetensors",
    {
        "": ("uint8", [1], 1),
        "caf\u00e9 \u2028 \U0001f600": ("uint8", [2], 2),
        'quote " backslash \\ slash /': ("uint8", [3], 3),
        "\b\f\n\r\t\x01\x1f\x7f": ("uint8", [4], 4),
        "Z": ("uint8", [1], 1),
        "a": ("uint8", [1], 1),
    },
    {'a "key"\n': "and \u00e4 value\t"},
)
write("empty.safetensors", {})

first = {"embed.weight": ("float32", [4, 3], 48), "layers.0.weight": ("bfloat16", [3, 3], 18)}
second = {"layers.1.weight": ("bfloat16", [3, 3], 18), "norm": ("float32", [3], 12)}
files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
total = sum(write("model/" + file, part, {"format": "pt"}) for file, part in zip(files, (first, second)))
index = {"metadata": {"total_size": total}, "weight_map": {n: f for f, p in zip(files, (first, second)) for n in p}}
with open(os.path.join(here, "model/model.safetensors.index.json"), "w", encoding="utf-8") as out:
    out.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
