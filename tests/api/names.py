"""Names that others read: the keys of `tensorbus status --json` and of /status, metrics and their labels. They may be
added, and never removed or renamed; and the documentation has all of them."""

import json
import re
import subprocess
import urllib.request

from bus import PATIENCE, PATIENCE_MS, Agent, Bed, Program, all_do, check, equal, main, read_page, table_rows

# Keys of the report, and of what is in its lists.
TRANSFER = "direction attempt bytes_done bytes_total groups_done groups_total seconds gb_per_s phases"
KEYS = {
    "": "group index size rank incarnation pid version protocol state uptime store clients pairs batches peers totals",
    "store": "connected why",
    "clients": "name pid commands under_way",
    "pairs": "name local remote layout remote_layout state why clients batches sent received",
    "batches": "id client pid pairs tensors bytes state version transfers last error why",
    "batches.transfers": TRANSFER,
    "batches.transfers.phases": "plan wait pack wire unpack commit",
    "batches.last": TRANSFER,
    "batches.last.phases": "plan wait pack wire unpack commit",
    "peers": "rank label host transport sent received alive why",
    "totals": "send recv",
    "totals.send": "transfers failures bytes seconds by_seconds by_bytes",
    "totals.recv": "transfers failures bytes seconds by_seconds by_bytes",
}

# Metrics: type and labels.
METRICS = {
    "agent_info": ("gauge", "group version index rank incarnation"),
    "uptime_seconds": ("gauge", ""),
    "store_connected": ("gauge", ""),
    "clients": ("gauge", ""),
    "peers_alive": ("gauge", ""),
    "peers_lost": ("gauge", ""),
    "transfers_total": ("counter", "direction outcome"),
    "bytes_total": ("counter", "direction"),
    "transfer_seconds_total": ("counter", "direction"),
    "transfer_duration_seconds": ("histogram", "direction"),
    "transfer_size_bytes": ("histogram", "direction"),
    "transfers_under_way": ("gauge", ""),
    "pair_ready": ("gauge", "pair remote"),
    "pair_bytes_total": ("counter", "pair direction"),
    "peer_bytes_total": ("counter", "peer direction"),
    "batch_version": ("gauge", "batch"),
    "batch_bytes": ("gauge", "batch"),
    "transfer_seconds": ("gauge", "batch direction"),
    "transfer_phase_seconds": ("gauge", "batch direction phase"),
}


def collect_keys(value, path, found):
    if isinstance(value, list):
        for item in value:
            collect_keys(item, path, found)
    elif isinstance(value, dict):
        found.setdefault(path, set()).update(value)
        for key, inner in value.items():
            collect_keys(inner, f"{path}.{key}".lstrip("."), found)


def check_report(report, what):
    found, documented = {}, documented_words()
    collect_keys(report, "", found)
    for path, keys in KEYS.items():
        missing = set(keys.split()) - found.get(path, set())
        check(not missing, f"{what}: {path or 'the report'} has no {sorted(missing)}")
    for path, keys in found.items():
        unknown = {k for k in keys if k not in documented}
        check(not unknown, f"docs/protocol.md does not tell of {sorted(unknown)} in {path or 'the report'} of {what}")


def documented_words():
    """Everything in backticks in the part of docs/protocol.md about the report."""
    page = read_page("protocol.md")
    begin = page.index("`report` in the Reply")
    return set(re.findall(r"`([a-z_]+)`", page[begin : page.index("### Reply", begin)]))


def check_metrics(text):
    types = dict(re.findall(r"^# TYPE tensorbus_(\w+) (\w+)$", text, re.M))
    labels = {}
    for name, inner in re.findall(r"^tensorbus_(\w+)(?:\{(.*)\})? \S+$", text, re.M):
        names = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', inner)
        labels.setdefault(name, set(names))
        equal(set(names), labels[name], f"labels of {name}, which differ between samples")
    for name, (kind, wanted) in METRICS.items():
        equal(types.get(name), kind, f"the type of tensorbus_{name}")
        sample = name + "_count" if kind == "histogram" else name
        check(sample in labels, f"there is no sample of tensorbus_{sample}")
        missing = set(wanted.split()) - labels[sample]
        check(not missing, f"tensorbus_{name} has no label {sorted(missing)}")
    page = read_page("operations.md")
    page = page[page.index("| metric |") :]
    documented = {n for row in table_rows(page[: page.index("\n\n")]) for n in re.findall(r"`tensorbus_(\w+)`", row[0])}
    equal(documented - set(types), set(), "metrics that only docs/operations.md has")
    equal(set(types) - documented, set(), "metrics that docs/operations.md lacks")


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read().decode()


def run_names():
    with Bed() as bed:
        agent = Agent(bed, "trainer", 0, 1, "--http", "0")
        url = re.search(r"http://\S+/", agent.process.stdout.readline()).group()
        other = Agent(bed, "inference", 0, 1)
        programs = {}
        for a, remote in ((agent, "inference"), (other, "trainer")):
            p = programs[a.group] = Program(bed, a.group)
            p.do("connect", a.socket, timeout=PATIENCE_MS)
            p.ask("pair", "p", "p", remote, "mesh=1 place=R", timeout=PATIENCE_MS)
        for p in programs.values():
            p.answer().ok()
            p.do("batch", "b", "b")
            p.do("memory", "w", "alloc", "mesh=1 place=R", 0, 8, 8, "w")
            p.do("add", "b", "p", "w", "w")
        all_do(programs.values(), "register", "b", timeout=PATIENCE_MS)
        for group, direction in (("inference", "recv"), ("trainer", "send")):
            programs[group].do("begin", "t", "b", direction, timeout=PATIENCE_MS)
        for p in programs.values():
            p.wait("t", "committed").ok()
            p.do("end", "t")
        programs["trainer"].do("begin", "second", "b", "send", timeout=PATIENCE_MS)  # which stays under way
        printed = subprocess.run([bed.release.tensorbus, "status", "--json", "--socket", agent.socket],
                                 capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
        report = json.loads(printed)
        check("agents" in report and "socket" in report["agents"][0], f"status --json has no agents, or no socket: {report}")
        served = json.loads(get(url + "status"))
        check_report({k: v for k, v in report["agents"][0].items() if k != "socket"}, "status --json")
        check_report(served, "/status")
        check_metrics(get(url + "metrics"))


if __name__ == "__main__":
    main([("names", run_names)])
