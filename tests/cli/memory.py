"""Tensors in files that are not sealed, such as PyTorch's shared memory: they are read and written, not mapped."""

import array
import json
import mmap
import os
import tempfile
import time

from raw import FOLDER, Connection, bad, check, command, good, init_pair, memory, pack, start

ROWS, COLUMNS, WIDTH, OFFSET = 33, 20, 24, 4096
NBYTES = ((ROWS - 1) * WIDTH + COLUMNS) * 4
POISON = b"\xa5"


def shared_file(nbytes, folder="/dev/shm"):
    """A file without a name, as PyTorch has them in /dev/shm."""
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    os.ftruncate(fd, nbytes)
    return fd, mmap.mmap(fd, nbytes)


def reopen(fd, flags):
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def tensor(name, offset, fd=0):
    return pack({"name": name, "dtype": "f32", "shape": [ROWS, COLUMNS], "strides": [WIDTH, 1],
                 "mem": {"fd": fd, "offset": offset}, "nbytes": NBYTES})


def register(batch, *tensors):
    return {"type": "RegisterTensors", "batch_id": batch, "tensors": [["p", t] for t in tensors]}


def value(version, tensor, row, column):
    return version * 100000 + tensor * 10000 + row * COLUMNS + column


def fill(m, offset, version, tensor):
    for row in range(ROWS):
        data = array.array("f", [value(version, tensor, row, column) for column in range(COLUMNS)]).tobytes()
        m[offset + row * WIDTH * 4 : offset + row * WIDTH * 4 + COLUMNS * 4] = data


def expected(nbytes, offset, version, tensor):
    """What is poisoned stays, between rows, before and behind them."""
    m = bytearray(POISON * nbytes)
    fill(m, offset, version, tensor)
    return bytes(m)


def register_both(a, b, batch, from_fds, to_fds, *offsets):
    seq = a.send(register(batch, *(tensor(f"w{i}", at, min(i, len(from_fds) - 1)) for i, at in enumerate(offsets))), from_fds)
    good(b.call(register(batch, *(tensor(f"w{i}", at, min(i, len(to_fds) - 1)) for i, at in enumerate(offsets))), to_fds))
    good(a.reply(seq))


def move(a, b, batch):
    seq = b.send(command("Transfer", batch_id=batch, transfer_type="recv"))
    sent = a.call(command("Transfer", batch_id=batch, transfer_type="send"))
    return sent, b.reply(seq)


def clean(batch, *clients):
    for client in clients:
        good(client.call(command("CleanupBatch", batch_id=batch)))


def files_of(agent):
    folder = f"/proc/{agent.pid}/fd"
    links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    return [at for at in links if at.startswith(("/dev/shm/", f"{FOLDER}/tmp", "/memfd:raw"))]


def failure_of(client, batch):
    """Of a receive, once it has ended."""
    until = time.monotonic() + 20
    status = {"state": "receiving"}
    while status["state"] == "receiving" and time.monotonic() < until:
        status = good(client.call(command("QueryStatus", batch_id=batch, state_name="")))
    check(status["state"] == "failed", f"it has not failed: {status}")
    return status["error"]


def memory_of(client, batch):
    report = json.loads(good(client.call(command("Inspect")))["report"])
    return [b["memory"] for b in report["batches"] if b["id"] == batch][0]


agents = []
try:
    for group in ("trainer", "inference"):
        agents.append(start(group, 0, 1))
    a, b = (Connection(path, version=2) for _, path in agents)
    seq = a.send(init_pair())
    good(b.call(init_pair(local="inference", remote="trainer")))
    good(a.reply(seq))
    size = OFFSET + NBYTES + 512

    # Any two kinds: in /dev/shm, on disk, a memfd without seals, a sealed one; two tensors, in one file and in two.
    kinds = {
        "shm": shared_file,
        "disk": lambda nbytes: shared_file(nbytes, FOLDER),
        "memfd": lambda nbytes: (lambda fd: (os.ftruncate(fd, nbytes), (fd, mmap.mmap(fd, nbytes)))[1])(os.memfd_create("raw")),
        "sealed": memory,
    }
    for source, target in (("shm", "shm"), ("shm", "sealed"), ("sealed", "disk"), ("disk", "memfd"), ("memfd", "shm")):
        files = [kinds[source](size), kinds["sealed"](size)], [kinds[target](size), kinds["shm"](size)]
        register_both(a, b, "b", [fd for fd, _ in files[0]], [fd for fd, _ in files[1]], OFFSET, 0)
        copied = "host (file that is not sealed; copied)"
        wanted = "host" if source == "sealed" else f"{copied},host"
        check(memory_of(a, "b") == wanted, f"{source}: {memory_of(a, 'b')}")
        check(len(files_of(agents[1][0])) > 0, "the agent has none of the files")
        wanted = f"host,{copied}" if target == "sealed" else copied
        check(memory_of(b, "b") == wanted, f"{target}: {memory_of(b, 'b')}")
        for version in (1, 2):
            for i, at in enumerate((OFFSET, 0)):
                fill(files[0][i][1], at, version, i)
                files[1][i][1][:] = POISON * size
            for reply in move(a, b, "b"):
                check(good(reply)["version"] == version, f"versions: {reply}")
            for i, at in enumerate((OFFSET, 0)):
                check(files[1][i][1][:] == expected(size, at, version, i), f"{source} to {target}: tensor {i} is not version {version}")
        clean("b", a, b)
        for side in files:
            for fd, m in side:
                m.close()
                os.close(fd)
    for agent, _ in agents:
        check(not files_of(agent), f"descriptors are left behind: {files_of(agent)}")

    # Files that shrink, before they are read and before they are written: a failure, and no agent dies. They are not
    # made longer. Whole again, they are used again.
    (from_fd, from_map), (to_fd, to_map) = shared_file(size), shared_file(size)
    register_both(a, b, "b", [from_fd], [to_fd], OFFSET)
    fill(from_map, OFFSET, 7, 0)
    seq = b.send({**command("Transfer", batch_id="b", transfer_type="recv"), "timeout_ms": 1000})
    os.ftruncate(from_fd, OFFSET + 100)
    bad(a.call(command("Transfer", batch_id="b", transfer_type="send")), f"can't be read at byte {OFFSET + 100}: it ends there now")
    check(b.reply(seq)["status"] != 0, "nothing was sent, and something received")
    os.ftruncate(from_fd, size)
    fill(from_map, OFFSET, 8, 0)
    good(b.call({**command("Transfer", batch_id="b", transfer_type="recv"), "blocking": False}))
    os.ftruncate(to_fd, 200)
    good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
    error = failure_of(b, "b")
    check("can't be written at byte 200: it ends there now" in error, f"not that it is too short: {error}")
    check(os.fstat(to_fd).st_size == 200, "the file was made longer")
    bad(b.call(command("Transfer", batch_id="b", transfer_type="recv")), "can't be read at byte")
    os.ftruncate(to_fd, size)
    to_map[:] = POISON * size
    for reply in move(a, b, "b"):
        good(reply)
    check(to_map[:] == expected(size, OFFSET, 8, 0), "what came into the whole file is not what was sent")
    bad(b.call(register("c", tensor("w0", size - NBYTES + 4)), [to_fd]), "run past its memory")
    clean("b", a, b)

    # A descriptor that can only be read from is sent from, and not received into.
    reader = reopen(from_fd, os.O_RDONLY), reopen(to_fd, os.O_RDONLY)
    register_both(a, b, "b", [reader[0]], [to_fd], OFFSET)
    to_map[:] = POISON * size
    for reply in move(a, b, "b"):
        good(reply)
    check(to_map[:] == expected(size, OFFSET, 8, 0), "what was only read has not come")
    clean("b", a, b)
    register_both(a, b, "b", [from_fd], [reader[1]], OFFSET)
    _, received = move(a, b, "b")
    bad(received, "can't be written at byte")
    clean("b", a, b)

    # What is refused.
    pipe = os.pipe()
    others = os.open("/etc/passwd", os.O_RDONLY)
    if os.geteuid() == 0:
        others, path = tempfile.mkstemp(dir=FOLDER)
        os.unlink(path)
        os.fchown(others, 12345, 12345)
    for fd, words in (
        (pipe[0], "not that of a file"),
        (reopen(to_fd, os.O_WRONLY), "not opened for reading"),
        (os.open(FOLDER, os.O_PATH), "not that of a file"),
        (reopen(to_fd, os.O_RDWR | os.O_APPEND), "opened for appending"),
        (others, "belongs to user"),
    ):
        reply = a.call(register("c", tensor("w", 0)), [fd])
        bad(reply, words)
        check(reply["status"] == 9, f"not code 9: {reply}")
    bad(a.call({**register("c", tensor("w", 0)), "mark": 0}, [to_fd]), "the mark is in memory that is not sealed")
    both = [tensor("w0", 0), tensor("w1", 8)]
    bad(a.call(register("c", *both), [to_fd]), "overlap without being the same")

    for agent, path in reversed(agents):
        agent.terminate()
        check(agent.wait(20) == 0, f"{path} ended with {agent.returncode}")
    agents = []
finally:
    for agent, _ in agents:
        agent.kill()
        agent.wait()
