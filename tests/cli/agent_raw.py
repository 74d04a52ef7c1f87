"""Drives two agents with raw bytes."""

import array
import ctypes
import os
import struct
import time

from raw import Connection, bad, check, command, good, init_pair, memory, register, start, tensor

agents = []
try:
    # The store is the first agent's.
    for group in ("trainer", "inference"):
        agents.append(start(group, 0, 1))
    (_, trainer_path), (_, inference_path) = agents
    check(os.stat(trainer_path).st_mode & 0o777 == 0o600, "the socket's mode is not 0600")

    # Hello first, and the right version.
    c = Connection(trainer_path, hello=False)
    bad(c.call(command("CleanupBatch", batch_id="b")), "Hello")
    c = Connection(trainer_path, hello=False)
    bad(c.call({"type": "Hello", "version": 9, "token": None, "client": "raw"}), "9")

    a, b = Connection(trainer_path), Connection(inference_path)
    check(a.hello["status"] == 0 and a.hello["name"] == "trainer" and a.hello["version"] == 1, f"hello: {a.hello}")

    # Errors leave the connection, and others, as they are.
    bad(a.call(command("Dance")), "Dance")
    bad(a.call({"type": "Transfer", "batch_id": "b", "timestamp": None, "semaphore_name": None}), "transfer_type")
    bad(a.call(command("Transfer", batch_id=7, transfer_type="send")), "batch_id")
    bad(a.call(command("Transfer", batch_id="b", transfer_type="send")), "no batch 'b'")
    bad(a.call(register("b", [tensor("w", [4], 0, 16)])), "no pair 'p'")
    bad(a.call(init_pair(local="nobody", size=2)), "nobody")
    bad(a.call(init_pair(size=3)), "3")

    # A pair: neither side is answered before both have come.
    first = a.send(init_pair())
    time.sleep(0.2)
    good(b.call(init_pair(local="inference", remote="trainer")))
    good(a.reply(first))
    good(a.call(init_pair()))
    bad(a.call(init_pair(placements=(["S", 0],))), "already")

    # Tensors.
    ROWS, COLUMNS = 64, 32
    NBYTES = ROWS * COLUMNS * 4
    fd_a, memory_a = memory(NBYTES + 4096)
    fd_b, memory_b = memory(NBYTES)
    bad(a.call(register("far", [tensor("w", [ROWS, COLUMNS], 8192, NBYTES)]), [fd_a]), "w")
    seq = a.send(register("b", [tensor("w", [ROWS, COLUMNS], 4096, NBYTES)]), [fd_a])
    good(b.call(register("b", [tensor("w", [ROWS, COLUMNS], 0, NBYTES)]), [fd_b]))
    good(a.reply(seq))
    bad(a.call(register("b", [tensor("w", [ROWS, COLUMNS], 4096, NBYTES)]), [fd_a]), "already")

    # Versions, with a semaphore.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    for version in range(1, 4):
        values = array.array("f", [version * 10000 + i for i in range(ROWS * COLUMNS)]).tobytes()
        memory_a[4096:] = values
        memory_b[:] = b"\xa5" * NBYTES
        name = f"/tensorbus-raw-{os.getpid()}-{version}"
        semaphore = libc.sem_open(name.encode(), os.O_CREAT | os.O_EXCL, 0o600, 0)
        check(semaphore, "sem_open failed")
        receiving = command("Transfer", batch_id="b", transfer_type="recv")
        receiving["semaphore_name"] = name
        seq = b.send(receiving)
        sent = good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
        check(libc.sem_wait(ctypes.c_void_p(semaphore)) == 0, "sem_wait failed")
        received = good(b.reply(seq))
        check(sent["version"] == received["version"] == version, f"versions: {sent} {received}")
        check(memory_b[:] == values, f"version {version} is not what was sent")
        check(not libc.sem_open(name.encode(), 0), "the semaphore's name is still there")

    # Whoever waits is woken where the command made no sense, too; and what is no semaphore harms nobody.
    name = f"/tensorbus-raw-{os.getpid()}-wrong"
    semaphore = libc.sem_open(name.encode(), os.O_CREAT | os.O_EXCL, 0o600, 0)
    check(semaphore, "sem_open failed")
    bad(b.call({"type": "Transfer", "batch_id": "b", "transfer_type": "sideways", "semaphore_name": name}), "sideways")
    good(b.call(command("Inspect")))
    check(libc.sem_trywait(ctypes.c_void_p(semaphore)) == 0, "the semaphore of a malformed command was not posted")
    check(not libc.sem_open(name.encode(), 0), "the name of a malformed command's semaphore is still there")
    with open(f"/dev/shm/sem.{name[1:]}", "xb") as file:
        file.write(b"\xff" * 32)
    good(b.call({**command("Inspect"), "semaphore_name": name}))
    good(b.call(command("Inspect")))
    status = good(b.call(command("QueryStatus", batch_id="b", state_name="version")))
    check(status["version"] == 3, f"status: {status}")
    status = good(a.call(command("QueryStatus", batch_id="b", state_name="transfer_signal")))
    check(status["transfer_signal"] is False, f"status: {status}")

    # A stream that can't be trusted is closed after a reply; the agent goes on.
    for nonsense in (b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff"):
        c = Connection(trainer_path)
        c.socket.sendall(nonsense)
        try:
            check(c.reply(1)["status"] != 0, "nonsense was taken")
        except EOFError:
            pass

    # An agent that is killed: the other one's client is told at once. When another has come in its place the pair can
    # be made again, under the same name; the batch that used the old one can only be cleaned up.
    seq = a.send(command("Transfer", batch_id="b", transfer_type="send"))
    agents[1][0].kill()
    agents[1][0].wait()
    bad(a.reply(seq), "was lost")
    agents[1] = start("inference", 0, 1)
    b = Connection(inference_path)
    seq = a.send(init_pair())
    good(b.call(init_pair(local="inference", remote="trainer")))
    good(a.reply(seq))
    bad(a.call(command("Transfer", batch_id="b", transfer_type="send")), "was lost")
    good(a.call(command("CleanupBatch", batch_id="b")))
    seq = a.send(register("b", [tensor("w", [ROWS, COLUMNS], 4096, NBYTES)]), [fd_a])
    good(b.call(register("b", [tensor("w", [ROWS, COLUMNS], 0, NBYTES)]), [fd_b]))
    good(a.reply(seq))
    memory_b[:] = b"\xa5" * NBYTES
    seq = b.send(command("Transfer", batch_id="b", transfer_type="recv"))
    good(a.call(command("Transfer", batch_id="b", transfer_type="send")))
    good(b.reply(seq))
    check(memory_b[:] == values, "what came after the loss is not what was sent")

    good(a.call(command("CleanupBatch", batch_id="b")))
    bad(a.call(command("CleanupBatch", batch_id="b")), "no batch 'b'")
    good(b.call(command("CleanupBatch", batch_id="b")))

    # SIGTERM ends them.
    for agent, path in reversed(agents):
        agent.terminate()
        check(agent.wait(20) == 0, f"{path} ended with {agent.returncode}")
        check(not os.path.exists(path), f"{path} is still there")
    agents = []
finally:
    for agent, _ in agents:
        agent.kill()
        agent.wait()
