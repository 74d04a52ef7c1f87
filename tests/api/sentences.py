"""The sentences of docs/operations.md, "Failures and what they look like": each is provoked, and compared with the page.

Scenarios below yield what was said. Numbers, addresses and paths are examples on the page, so they are replaced in both;
names are those of the page. What a scenario yields must be on the page with the same status, and each sentence of the
page must come from a scenario, or be in NOT_PROVOKED. So whoever changes a sentence changes it on the page, too."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

from bus import (PATIENCE, PATIENCE_MS, SHORT_MS, Agent, Bed, Program, Release, Store, check, main, read_page,
                 stop, table_rows, until)

# Words of a sentence, and why no scenario here provokes it.
NOT_PROVOKED = {
    "nothing has come from it for": "takes 13 s of silence; tests/hosts has it",
    "it stood still while an operation": "needs RDMA",
    "does not answer": "takes a link that is cut; tests/hosts has it",
    "it has begun a new connection": "takes a link that is cut; transport/again_test has it",
    "a forked child can't use it": "takes a fork; bus/fork_test and bus/agent/client_fork_test have it",
    "has not confirmed our registration": "takes a rank without descriptors; bus/descriptors_test has it",
    "this process can't accept a connection": "the same",
    "all ranks of a bus must have one version": "needs a release that does not mix with this one; mixed.py has it",
}

LAYOUT = "mesh=1 place=S0"
NOBODY = 65534
STATUS_NAMES = ("TB_OK TB_INVALID TB_NO_MEMORY TB_TOO_BIG TB_REFUSED TB_IO TB_INTERNAL TB_TIMEOUT TB_LOST TB_DENIED "
                "TB_CONFLICT TB_CANCELLED TB_IN_DOUBT TB_SUPERSEDED").split()


def normalise(sentence):
    sentence = re.sub(r"/proc/\d+/", "PROC/", sentence)
    sentence = re.sub(r"(?<![\w'/:])/[^\s/:'?,;][^\s:'?,;]*|(?<=unix:)/[^\s:'?,;]+", "PATH", sentence)
    sentence = re.sub(r"\b(tcp|etcd|http)://[^\s:']+:\d+", r"\1://ADDRESS", sentence)
    sentence = re.sub(r"\bon host [^\s,;:()]+", "on host HOST", sentence)
    sentence = re.sub(r"0x[0-9a-f]+", "0xN", sentence)
    return re.sub(r"\d+(\.\d+)?", "N", sentence)


def documented():
    """(normalised sentence, status or None) of every row, and the sentence as it stands there."""
    page = read_page("operations.md")
    rows = {}
    for cells in table_rows(page[page.index("## Failures and what they look like") :]):
        sentence = re.match(r"`([^`]*)`", cells[0]).group(1)
        status = cells[1] if cells[1].startswith("TB_") else None
        rows[normalise(sentence), status] = sentence
    return rows


# ---- Scenarios: generators of (status, sentence) ---------------------------------------------------------------------


def failure(answer):
    check(answer.status != "TB_OK", f"{answer}: should have failed")
    return answer.status, answer.text


def connect(bed, path, user=None, release=None, **options):
    options.setdefault("timeout", PATIENCE_MS)
    p = Program(bed, "trainer program", user=user, release=release)
    return p, p.call("connect", path, **options)


def program(bed, agent, **options):
    p, answer = connect(bed, agent.socket, **options)
    answer.ok()
    return p


def said_by(agent):
    """What an agent says that does not start."""
    agent.process.wait(PATIENCE)
    line = agent.said()
    check(line.count("\n") == 1, f"an agent said: {line}")
    return None, line.rstrip("\n")


def connecting(bed):
    yield failure(connect(bed, f"{bed.folder}/none", timeout=SHORT_MS)[1])
    agent = Agent(bed, "trainer", 0, 1)
    agent.kill()
    yield failure(connect(bed, agent.socket, timeout=SHORT_MS)[1])
    agent = Agent(bed, "trainer", 0, 1)
    stop(agent.process)
    yield failure(connect(bed, agent.socket, timeout=SHORT_MS)[1])
    agent.kill()


def token_file(bed, token):
    path = f"{bed.folder}/token-{token}"
    with open(path, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return path


def tokens(bed):
    agent = Agent(bed, "trainer", 0, 1, "--token-file", token_file(bed, "right" * 8))
    yield failure(connect(bed, agent.socket, token="wrong")[1])
    yield said_by(Agent(bed, "inference", 0, 1, "--token-file", token_file(bed, "wrong" * 8), wait=False))
    store = subprocess.run([bed.release.tensorbus, "store", "--listen", "tcp://0.0.0.0:0"], capture_output=True, text=True,
                           timeout=PATIENCE, check=False)
    yield None, store.stderr.rstrip("\n")


def shared_with_nobody(bed):
    """The folder and the programs are within the reach of another user."""
    release = Release(shutil.copy(bed.release.tensorbus, f"{bed.folder}/tensorbus"),
                      shutil.copy(bed.release.program, f"{bed.folder}/program"))
    os.chmod(bed.folder, 0o777)
    return release


def other_users(bed):
    release = shared_with_nobody(bed)
    agent = Agent(bed, "trainer", 0, 1)
    yield failure(connect(bed, agent.socket, user=NOBODY, release=release)[1])
    os.chmod(agent.socket, 0o666)
    yield failure(connect(bed, agent.socket, user=NOBODY, release=release)[1])


def agents_that_stop(bed):
    """Who listens closes the connection, and has not read what the program said."""
    path = f"{bed.folder}/closing"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        p = Program(bed, "trainer program")
        p.ask("connect", path, timeout=PATIENCE_MS)
        connection = listener.accept()[0]
        connection.settimeout(PATIENCE)
        connection.recv(1, socket.MSG_PEEK)
        connection.close()
        yield failure(p.answer())


def agents(bed):
    first = Agent(bed, "trainer", 0, 1)
    yield said_by(Agent(bed, "trainer", 0, 1, socket=first.socket, wait=False))
    yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "1", socket=f"{bed.folder}/second", wait=False))
    yield said_by(Agent(bed, "trainer", 1, 3, "--timeout", "1", wait=False))


def store_hosts_that_do_not_answer(bed):
    """A listener whose queue is full drops what else comes, as a host does that is not there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        queued = []
        for _ in range(4):
            queued.append(socket.socket())
            queued[-1].setblocking(False)
            queued[-1].connect_ex(listener.getsockname())
        agent = Agent(bed, "trainer", 0, 1, "--timeout", "1", wait=False,
                      store=f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        yield said_by(agent)
        for connection in queued:
            connection.close()


def ports_of_others(bed):
    """Where nobody listens, or another program does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "1", store=f"etcd://127.0.0.1:{port}", wait=False))
    yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "1", store="tcp://0.0.0.0:80000", wait=False))
    yield said_by(Agent(bed, "trainer", 0, 1, socket="/" + 123 * "x", wait=False))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "1", store=f"etcd://127.0.0.1:{port}", wait=False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve():
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    connection.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "2", store=url, wait=False))
        yield said_by(Agent(bed, "trainer", 0, 1, "--timeout", "9", store=url.replace("tcp", "etcd"), wait=False))
        store = subprocess.run([bed.release.tensorbus, "store", "--listen", url], capture_output=True, text=True,
                               timeout=PATIENCE, check=False)
        yield None, store.stderr.rstrip("\n")
        listener.shutdown(socket.SHUT_RDWR)


def pair(p, remote, layout=LAYOUT, name="weights", **options):
    options.setdefault("timeout", PATIENCE_MS)
    p.ask("pair", name, name, remote, layout, **options)


def pairs_that_wait(bed):
    p = program(bed, Agent(bed, "trainer", 0, 1))
    pair(p, "inference", timeout=SHORT_MS)
    yield failure(p.answer())
    Agent(bed, "inference", 0, 1)
    pair(p, "inference", timeout=SHORT_MS)
    yield failure(p.answer())
    pair(p, "inference", "mesh=2 place=S0")
    yield failure(p.answer())


def layouts_that_differ(bed):
    first, second = (program(bed, Agent(bed, "trainer", i, 2, wait=False)) for i in range(2))
    pair(first, "inference", "mesh=2 place=Shard(0)")
    pair(second, "inference", "mesh=2 place=Replicate")
    yield failure(first.answer())
    yield failure(second.answer())


def pairs_that_are_here(bed):
    agents_ = [Agent(bed, g, 0, 1, wait=False) for g in ("trainer", "inference")]
    trainer, inference = (program(bed, a) for a in agents_)
    pair(trainer, "inference", "mesh=1 place=Shard(0)")
    pair(inference, "trainer", "mesh=1 place=Shard(0)")
    trainer.answer().ok()
    inference.answer().ok()
    another = program(bed, agents_[0])
    pair(another, "inference", "mesh=1 place=Replicate")
    yield failure(another.answer())


def numbers_given_twice(bed):
    """The store is lost, and one that knows nothing gives a newcomer the number of a rank that lives."""
    trainer, other = Program(bed, "trainer"), Program(bed, "other")
    store = Store(bed, bed.url)
    trainer.do("join", bed.url, "trainer", 0, 1, timeout=PATIENCE_MS)
    other.do("join", bed.url, "other", 0, 1, timeout=PATIENCE_MS)
    pair(trainer, "other")
    pair(other, "trainer")
    trainer.answer().ok()
    other.answer().ok()
    for p in (trainer, other):  # who does not find the new store before the newcomer
        stop(p.process)
    store.kill()
    inference = Program(bed, "inference")
    inference.do("join", bed.url, "inference", 0, 1, timeout=PATIENCE_MS)
    check(inference.do("rank").values()[0] == 0, "the newcomer has another number")
    other.process.send_signal(signal.SIGCONT)
    pair(inference, "other", name="more", no_wait=1)
    inference.answer().ok()
    pair(other, "inference", name="more")
    yield failure(other.answer())


def programs_of_their_own(bed):
    """InitPair as a program writes it that does not use the library."""
    sys.argv[1:] = [bed.release.tensorbus, bed.folder]  # as raw.py is given them
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
    import raw  # pylint: disable=import-outside-toplevel,import-error

    agents_ = [Agent(bed, "trainer", i, 2, wait=False) for i in range(2)]
    for a in agents_:
        a.listening()
    connection = raw.Connection(agents_[0].socket)
    wrong = raw.init_pair(name="weights", local="inference", size=2, remote="trainer")
    for message in (raw.init_pair(name="weights", size=4), wrong):
        reply = connection.call(message)
        yield STATUS_NAMES[reply["status"]], reply["message"]


def two_agents(bed, **options):
    """A pair of one trainer and one engine, through agents; the two programs."""
    programs = {g: program(bed, Agent(bed, g, 0, 1, wait=False, **options)) for g in ("trainer", "inference")}
    pair(programs["trainer"], "inference")
    pair(programs["inference"], "trainer")
    for p in programs.values():
        p.answer().ok()
    return programs["trainer"], programs["inference"]


def add(p, name="w", rows=None, kind="alloc", **options):
    p.do("batch", "step", "step", **options)
    p.do("memory", name, kind, LAYOUT, 0, 64, 32, name)
    p.do("add", "step", "weights", name, name, rows=rows)


def register(*programs, timeout=PATIENCE_MS):
    for p in programs:
        p.ask("register", "step", timeout=timeout)
    return [p.answer() for p in programs]


def batches_that_differ(bed):
    trainer, inference = two_agents(bed)
    add(trainer)
    p = inference
    p.do("batch", "step", "step")
    p.do("memory", "w", "alloc", LAYOUT, 0, 128, 32, "w")
    p.do("add", "step", "weights", "w", "w")
    for answer in register(trainer, inference):
        yield failure(answer)


def names_that_differ(bed):
    trainer, inference = two_agents(bed)
    add(trainer, "a")
    add(inference, "b")
    for answer in register(trainer, inference):
        yield failure(answer)


def batches_that_wait(bed):
    trainer, _ = two_agents(bed)
    add(trainer)
    yield failure(register(trainer, timeout=SHORT_MS)[0])


def tensors_that_do_not_fit(bed):
    trainer, inference = two_agents(bed)
    trainer.do("batch", "step", "step")
    trainer.do("memory", "w", "malloc", LAYOUT, 0, 64, 32, "w")
    trainer.ask("add", "step", "weights", "w", "w", rows=1 << 24)
    yield failure(trainer.answer())


def registered(bed, commit=None, kind="alloc"):
    trainer, inference = two_agents(bed)
    for p in (trainer, inference):
        add(p, commit=commit, kind=kind)
    for answer in register(trainer, inference):
        answer.ok()
    return trainer, inference


def transfers_that_wait(bed):
    trainer, _ = registered(bed)
    trainer.do("begin", "t", "step", "send", timeout=1500)
    yield failure(trainer.wait("t", "committed"))


def agents_that_die(bed):
    trainer, inference = registered(bed)
    inference.do("begin", "t", "step", "recv", timeout=PATIENCE_MS)
    trainer.do("begin", "t", "step", "recv", timeout=PATIENCE_MS)  # nobody sends
    inference.ask("wait", "t", "committed", PATIENCE_MS)
    trainer.ask("wait", "t", "committed", PATIENCE_MS)
    [agent] = [a for a in bed.agents if a.group == "trainer"]
    agent.kill()
    yield failure(trainer.answer())
    yield failure(inference.answer())


def programs_that_give_up(bed):
    trainer, inference = registered(bed)
    inference.do("begin", "t", "step", "recv", timeout=PATIENCE_MS)
    inference.ask("wait", "t", "committed", PATIENCE_MS)
    trainer.kill()
    bed.programs.remove(trainer)
    yield failure(inference.answer())


def without_rights(bed, closed_before):
    """Agents that have no capabilities, and a program that they may not look at."""
    release, user = None, None
    if os.geteuid() == 0:
        release, user = shared_with_nobody(bed), NOBODY
    agents_ = [Agent(bed, g, 0, 1, user=user, release=release) for g in ("trainer", "inference")]
    trainer, inference = (program(bed, a, user=user, release=release) for a in agents_)
    pair(trainer, "inference")
    pair(inference, "trainer")
    trainer.answer().ok()
    inference.answer().ok()
    add(inference)
    add(trainer, kind="malloc")
    if closed_before:
        trainer.do("close_to_agents")
        inference.ask("register", "step", timeout=PATIENCE_MS)
        yield failure(register(trainer)[0])
        return
    for answer in register(trainer, inference):
        answer.ok()
    trainer.do("close_to_agents")
    yield failure(trainer.call("begin", "t", "step", "send", timeout=PATIENCE_MS))


def programs_that_can_not_be_looked_at(bed):
    yield from without_rights(bed, True)


def memory_that_can_not_be_read(bed):
    yield from without_rights(bed, False)


def report(bed, agent):
    printed = subprocess.run([bed.release.tensorbus, "status", "--json", "--socket", agent.socket], capture_output=True,
                             text=True, timeout=PATIENCE, check=True).stdout
    return json.loads(printed)["agents"][0]


def stores_that_die(bed):
    """And that nobody can serve in its place, because its folder is not there."""
    os.mkdir(f"{bed.folder}/here")
    url = f"unix:{bed.folder}/here/store"
    store = Store(bed, url)
    agent = Agent(bed, "inference", 0, 1, store=url)
    p = program(bed, agent)
    os.rename(f"{bed.folder}/here", f"{bed.folder}/away")
    store.kill()
    until(lambda: not report(bed, agent)["store"]["connected"], "the store is not lost")
    pair(p, "trainer", timeout=SHORT_MS)
    yield failure(p.answer())


SCENARIOS = [connecting, tokens, agents_that_stop, agents, store_hosts_that_do_not_answer, pairs_that_wait,
             layouts_that_differ, pairs_that_are_here, numbers_given_twice, programs_of_their_own, batches_that_differ,
             names_that_differ, batches_that_wait, tensors_that_do_not_fit, transfers_that_wait, agents_that_die,
             programs_that_give_up, programs_that_can_not_be_looked_at, memory_that_can_not_be_read, stores_that_die]


def find_row(rows, sentence, status):
    """A row that ends in ... has only the beginning of a sentence."""
    for wanted, its_status in rows:
        is_same = sentence == wanted or wanted.endswith("...") and sentence.startswith(wanted[:-3])
        if is_same and status == its_status:
            return wanted, its_status
    return None


def compare(rows, said, scenario):
    def run():
        with Bed() as bed:
            for status, sentence in scenario(bed):
                key = find_row(rows, normalise(sentence), status)
                check(key, f"docs/operations.md does not have, with status {status}: {sentence}")
                said.add(key)
    return run


def nothing_is_missing(rows, said, not_provoked):
    for key, sentence in rows.items():
        is_excused = any(words in sentence for words in not_provoked)
        check(key in said or is_excused, f"nobody says what docs/operations.md has: {sentence}")
    for words, why in not_provoked.items():
        check(any(words in s for s in rows.values()), f"docs/operations.md no longer has '{words}', which {why}")


def main_with_docs():
    rows, said, not_provoked, skips = documented(), set(), dict(NOT_PROVOKED), []
    cases = [(s.__name__, compare(rows, said, s)) for s in SCENARIOS]
    if any("port 80000" in sentence for sentence in rows.values()):
        cases.append((ports_of_others.__name__, compare(rows, said, ports_of_others)))
    if os.geteuid() == 0:
        cases.append((other_users.__name__, compare(rows, said, other_users)))
    else:
        skips.append("other_users: only root can be two users")
        not_provoked.update({" is another user's": "needs root", " may not use the agent of user ": "needs root"})
    if len(sys.argv) == 1:
        cases.append(("nothing_is_missing", lambda: nothing_is_missing(rows, said, not_provoked)))
    main(cases, skips)


if __name__ == "__main__":
    main_with_docs()
