"""The bus protocol in raw bytes: nothing here knows more than docs/protocol.md and Python's standard library. Scripts
that use it are given the tool and an empty folder."""

import array
import fcntl
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys

TENSORBUS, FOLDER = sys.argv[1], sys.argv[2]
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2


def check(claim, what):
    if not claim:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {what}")


# ---- MessagePack, as much as the protocol needs ----------------------------------------------------------------------


def pack(x):
    if x is None:
        return b"\xc0"
    if x is True or x is False:
        return b"\xc3" if x else b"\xc2"
    if isinstance(x, int):
        if x >= 0:
            for limit, head, form in ((0x80, b"", "B"), (1 << 8, b"\xcc", "B"), (1 << 16, b"\xcd", ">H"), (1 << 32, b"\xce", ">I")):
                if x < limit:
                    return head + struct.pack(form, x)
            return b"\xcf" + struct.pack(">Q", x)
        return struct.pack("b", x) if x >= -32 else b"\xd3" + struct.pack(">q", x)
    if isinstance(x, float):
        return b"\xcb" + struct.pack(">d", x)
    if isinstance(x, str):
        b = x.encode()
        n = len(b)
        return (bytes([0xA0 | n]) if n < 32 else b"\xd9" + bytes([n]) if n < 256 else b"\xda" + struct.pack(">H", n)) + b
    if isinstance(x, bytes):
        n = len(x)
        return (b"\xc4" + bytes([n]) if n < 256 else b"\xc5" + struct.pack(">H", n)) + x
    if isinstance(x, (list, tuple)):
        n = len(x)
        return (bytes([0x90 | n]) if n < 16 else b"\xdc" + struct.pack(">H", n)) + b"".join(map(pack, x))
    if isinstance(x, dict):
        n = len(x)
        head = bytes([0x80 | n]) if n < 16 else b"\xde" + struct.pack(">H", n)
        return head + b"".join(pack(k) + pack(v) for k, v in x.items())
    raise TypeError(x)


def unpack(b, at=0):
    c = b[at]
    at += 1
    if c < 0x80:
        return c, at
    if c >= 0xE0:
        return c - 256, at
    if c & 0xE0 == 0xA0:
        return b[at : at + (c & 31)].decode(), at + (c & 31)
    if c & 0xF0 in (0x80, 0x90):
        return unpack_many(b, at, c & 15, c & 0xF0 == 0x80)
    if c == 0xC0:
        return None, at
    if c in (0xC2, 0xC3):
        return c == 0xC3, at
    forms = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q", 0xCB: ">d"}
    if c in forms:
        n = struct.calcsize(forms[c])
        return struct.unpack(forms[c], b[at : at + n])[0], at + n
    sizes = {0xD9: 1, 0xDA: 2, 0xC4: 1, 0xC5: 2, 0xDC: 2, 0xDE: 2}
    n = int.from_bytes(b[at : at + sizes[c]], "big")
    at += sizes[c]
    if c in (0xDC, 0xDE):
        return unpack_many(b, at, n, c == 0xDE)
    data = b[at : at + n]
    return (data.decode() if c in (0xD9, 0xDA) else data), at + n


def unpack_many(b, at, n, is_map):
    items = []
    for _ in range(n * (2 if is_map else 1)):
        x, at = unpack(b, at)
        items.append(x)
    return (dict(zip(items[::2], items[1::2])) if is_map else items), at


# ---- A connection ----------------------------------------------------------------------------------------------------


class Connection:
    def __init__(self, path, hello=True, version=1):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self.seq = 0
        self.kept = {}
        if hello:
            self.hello = self.call({"type": "Hello", "version": version, "token": None, "client": "raw"})

    def send(self, message, fds=()):
        frame = message if isinstance(message, bytes) else pack(message)
        frame = struct.pack("<I", len(frame)) + frame
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        n = self.socket.sendmsg([frame], rights)
        if n < len(frame):
            self.socket.sendall(frame[n:])
        self.seq += 1
        return self.seq - 1

    def exactly(self, n):
        data = b""
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def reply(self, seq):
        while seq not in self.kept:
            n = struct.unpack("<I", self.exactly(4))[0]
            message, end = unpack(self.exactly(n))
            check(end == n and message["type"] == "Reply", f"no reply: {message}")
            self.kept[message["seq"]] = message
        return self.kept.pop(seq)

    def call(self, message, fds=()):
        return self.reply(self.send(message, fds))


def command(kind, **fields):
    return {"type": kind, **fields, "timestamp": None, "semaphore_name": None}


def good(reply):
    check(reply["status"] == 0, f"failed: {reply}")
    return reply


def bad(reply, words):
    check(reply["status"] != 0 and words in reply["message"], f"should have failed with '{words}': {reply}")


# ---- Agents ----------------------------------------------------------------------------------------------------------


def start(group, index, size, *options, store=f"unix:{FOLDER}/store"):
    path = f"{FOLDER}/{group}{index}.sock"
    agent = subprocess.Popen(
        [TENSORBUS, "agent", "--name", group, "--rank", str(index), "--size", str(size)]
        + ["--store", store, "--socket", path, "--timeout", "20", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    check("listens at" in agent.stdout.readline(), f"{group} did not start")
    return agent, path


def stop(process):
    """Stops all threads of a child, until SIGCONT. A signal alone is on its way for a while."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def init_pair(name="p", local="trainer", size=1, remote="inference", placements=(["R"],)):
    return command(
        "InitPair", pair_name=name, local_name=local, expected_world_size=size, remote_name=remote,
        mesh_shape_payload=pack({"shape": [1], "ranks": None}), placements_payload=pack(list(placements)),
    )


def memory(nbytes):
    fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
    return fd, mmap.mmap(fd, nbytes)


def tensor(name, shape, offset, nbytes):
    return pack({
        "name": name, "dtype": "f32", "shape": shape, "strides": None, "placements": None, "view": None,
        "encode": None, "group": 0, "mem": {"fd": 0, "offset": offset}, "nbytes": nbytes,
    })


def register(batch, tensors, pair="p"):
    return command("RegisterTensors", batch_id=batch, tensors=[[pair, t] for t in tensors], bucket_size=1 << 20)
