"""A process that has everything, while the two that send have half of the rows each. See send.py."""

import tensorbus as tb

with tb.join("unix:/tmp/tensorbus-first.sock", group="engine", index=0, size=1) as bus:
    pair = bus.pair("weights", "trainer", layout="mesh=1 place=Replicate")
    whole = tb.empty((6, 4), "f32")
    batch = bus.batch("step")
    batch.add(pair, "w", whole)

    for _ in range(3):
        batch.recv(timeout=30.0)
        print(f"engine: version {batch.version}, last row {whole.memoryview()[5:].tolist()[0]}")
