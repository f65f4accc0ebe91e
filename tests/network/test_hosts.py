"""Hosts in network namespaces: shaped, joined, and gone afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestpipe.bench.machines import LINK, inside, launch_on_hosts, shaped_hosts

PROGRAM = Path(__file__).with_name("host_program.py")
HOLD = """
import signal, time
from nestpipe.bench.machines import shaped_hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with shaped_hosts(2, "50mbit") as hosts:
    print(*[host.holder for host in hosts], flush=True)
    while True:
        time.sleep(0.01)  # `signal.pause` sleeps over a signal that comes just before it
"""


def said_in(holder: int, command: str) -> str:
    line = inside(holder, command.split())
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def shaped_links(holder: int) -> list[str]:
    shown = said_in(holder, "tc qdisc show")
    return re.findall(r"qdisc tbf \S+ dev (\w+) root .*rate 50Mbit", shown)


def namespace_of(process: int) -> str:
    return str(Path(f"/proc/{process}/ns/net").readlink())


def namespaces_in_use() -> set[str]:
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.add(str((process / "ns/net").readlink()))
            except OSError:
                continue  # it has ended meanwhile
    return found


def own_links() -> list[str]:
    return sorted(link.name for link in Path("/sys/class/net").iterdir())


def test_every_link_is_shaped_both_ways_and_nothing_is_left():
    links = own_links()
    with shaped_hosts(2, "50mbit") as hosts:
        made = {namespace_of(host.holder) for host in hosts}
        assert len(made) == 2
        assert namespace_of(os.getpid()) not in made
        for host in hosts:
            assert shaped_links(host.holder) == [LINK]
            assert host.address in said_in(host.holder, f"ip -brief address show dev {LINK}")
        assert shaped_links(hosts[0].switch) == ["port0", "port1"]
        assert own_links() == links, "the machine's own network is not touched"
    assert own_links() == links
    assert not made & namespaces_in_use()


def test_ranks_on_two_hosts_exchange_rows():
    with shaped_hosts(2, "200mbit") as hosts:
        assert launch_on_hosts(hosts, [sys.executable, str(PROGRAM), "exchange"]) == 0
        sent = re.findall(r"Sent (\d+) bytes", said_in(hosts[0].holder, "tc -s qdisc show"))
        assert sum(map(int, sent)) > 40_000, "the rows went over the shaped link"


def test_two_sets_of_hosts_do_not_meet():
    with shaped_hosts(1, "50mbit") as here, shaped_hosts(1, "50mbit") as there:
        assert here[0].address == there[0].address
        assert namespace_of(here[0].holder) != namespace_of(there[0].holder)


def test_a_failed_rank_stops_the_others_and_gives_the_status():
    with shaped_hosts(2, "200mbit") as hosts:
        assert launch_on_hosts(hosts, [sys.executable, str(PROGRAM), "one_fails"]) == 7


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as holding:
        assert holding.stdout is not None
        made = {namespace_of(int(pid)) for pid in holding.stdout.readline().split()}
        assert len(made) == 2
        holding.send_signal(how)
    for _ in range(200):  # after SIGKILL the holders end by themselves, a moment later
        if not made & namespaces_in_use():
            break
        time.sleep(0.05)
    assert not made & namespaces_in_use()


def test_plans_are_compared_on_hosts(tmp_path):
    """The whole command, on work so small that only its end counts."""
    sizes = (
        "batch=4",
        "keys=3",
        "rows=100",
        "dim=4",
        "width=4",
        "micro_batches=2",
        "rounds=1",
        "steps=8",
    )
    command = [sys.executable, "-m", "nestpipe", "bench", "pipeline", "--hosts", "--ranks", "2"]
    command += [part for size in sizes for part in ("--set", size)]
    command += ["--plans", "nested", "--retrieval", "new", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["hosts"] is True
    assert found["plans"][-1]["plan"] == "nested"
    assert found["plans"][-1]["predicted_ms"] > 0
