"""Two processes that have half of the rows each: python send.py 0 & python send.py 1 & python recv.py"""

import sys

import tensorbus as tb

seat = int(sys.argv[1])
with tb.join("unix:/tmp/tensorbus-first.sock", group="trainer", index=seat, size=2) as bus:
    pair = bus.pair("weights", "engine", layout="mesh=2 place=Shard(0)")
    half = tb.empty((3, 4), "f32")  # rows 3 * seat, ... of 6
    batch = bus.batch("step")
    batch.add(pair, "w", half, shape=(6, 4))

    values = half.memoryview()
    for version in (1, 2, 3):
        for i in range(3):
            for j in range(4):
                values[i, j] = 100 * version + 10 * (3 * seat + i) + j
        batch.send(timeout=30.0)  # returns when the memory may change again
        print(f"trainer {seat}: sent version {version}")
