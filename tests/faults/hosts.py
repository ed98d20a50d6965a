"""Hosts of their own for the sites of a test: network namespaces, joined by a bridge.

Every site runs on its own host with its own address, and the network between them can be cut,
thinned out or slowed down as a real one would be.  The bridge has a namespace of its own, too: no
packet leaves for the machine's own network, and nothing of it is changed.  It needs root and the
tools `ip`, `tc` and `iptables`; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from lightyear_node.lab.federation import START, Federation, SiteHome
from lightyear_node.records import PeerName

Calls = Mapping[int, Collection[PeerName]]
"""Who calls, or is called, at which port."""

PORT = 7000
DEVICE = "eth0"
NETNS_ETC = Path("/etc/netns")
"""What stands here under a namespace's name stands in /etc for whoever runs in it."""
MARK = "netns"
"""In a site's home: the name of its namespace."""
START_THERE = ("sh", "-c", f'exec ip netns exec "$(cat {MARK})" "$@"', "sh", *START)
"""In its own host; the shell and `ip` become the site, so its process number is known."""


def why_not(*tools: str) -> str | None:
    """What this machine lacks for having hosts, with these further tools, if anything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "iptables", *tools):
        if shutil.which(tool) is None:
            package = "iproute2" if tool in ("ip", "tc") else tool
            return f"`{tool}` is not installed (apt install {package})"
    trial = f"ly-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", trial], check=True)
    return None


class Hosts:
    """One host for each site, as a context manager that leaves nothing behind."""

    def __init__(self, homes: Sequence[SiteHome]) -> None:
        self._namespaces = {home.name: f"ly-{os.getpid()}-{home.name}" for home in homes}
        self._bridge = f"ly-{os.getpid()}-bridge"
        self._gateways: list[str] = []
        self._ips = {home.name: f"10.77.0.{n}" for n, home in enumerate(homes, start=1)}
        self.homes = [self._moved(home) for home in homes]

    def __enter__(self) -> Self:
        _sweep()
        try:
            _run("ip", "netns", "add", self._bridge)
            self._at(self._bridge, "ip", "link", "add", "bridge", "type", "bridge")
            self._at(self._bridge, "ip", "link", "set", "bridge", "up")
            for name in self._namespaces:
                self._plug_in(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*self._namespaces.values(), *self._gateways, self._bridge):
            _remove(namespace)

    def federation(self) -> Federation:
        return Federation(self.homes, START_THERE)

    def address(self, name: PeerName) -> str:
        return f"{self._ips[name]}:{PORT}"

    def ip(self, name: PeerName) -> str:
        return self._ips[name]

    def lose(self, name: PeerName, sender: PeerName) -> None:
        """Nothing that `sender` sends arrives at `name` any more."""
        self._filter(name, "-s", self._ips[sender])

    def refuse_calls(self, name: PeerName, caller: PeerName) -> None:
        """`name` cannot be called by `caller`, while it can call itself: a firewall."""
        self._filter(name, "-s", self._ips[caller], "-p", "tcp", "--dport", str(PORT))

    def part(self, *groups: Collection[PeerName]) -> None:
        """Cut the network between groups of sites, in both directions."""
        for group in groups:
            others = [name for other in groups if other is not group for name in other]
            for name in group:
                for other in others:
                    self.lose(name, other)

    def thin_out(self, share: float) -> None:
        """Everybody loses this share of the packets sent to it."""
        for name in self._namespaces:
            self._filter(name, "-m", "statistic", "--mode", "random", "--probability", f"{share}")

    def slow_down(self, name: PeerName, rate: str) -> None:
        """What a site sends leaves at this rate, such as `1mbit`."""
        bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        self.run(name, "tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket)

    def put_behind_nat(self, name: PeerName, port: int) -> None:
        """A gateway takes the host's address, forwards one port to it, and lets it call out."""
        gateway, inside, host = f"{self._namespaces[name]}-nat", "192.168.77.1", "192.168.77.2"
        self._gateways.append(gateway)
        _run("ip", "netns", "add", gateway)
        self.run(name, "ip", "link", "set", DEVICE, "netns", gateway)
        cable = ("peer", "name", DEVICE, "netns", self._namespaces[name])
        self._at(gateway, "ip", "link", "add", "inside", "type", "veth", *cable)
        for at, ip, device in (
            (gateway, self._ips[name], DEVICE),
            (gateway, inside, "inside"),
            (self._namespaces[name], host, DEVICE),
        ):
            self._at(at, "ip", "address", "add", f"{ip}/24", "dev", device)
            self._at(at, "ip", "link", "set", device, "up")
        self.run(name, "ip", "route", "add", "default", "via", inside)
        self._at(gateway, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        nat = ("iptables", "-t", "nat", "-A")
        forwarded = ("-p", "tcp", "--dport", str(port), "-j", "DNAT", "--to", f"{host}:{port}")
        self._at(gateway, *nat, "PREROUTING", "-i", DEVICE, *forwarded)
        self._at(gateway, *nat, "POSTROUTING", "-o", DEVICE, "-j", "MASQUERADE")

    def let_through(self, name: PeerName, calls_in: Calls, calls_out: Calls) -> None:
        """A firewall: connections from and to these only, by port; all others are dropped."""
        for chain, flag, calls in (("INPUT", "-s", calls_in), ("OUTPUT", "-d", calls_out)):
            begin = ("iptables", "-A", chain)
            self.run(name, *begin, "-i" if chain == "INPUT" else "-o", "lo", "-j", "ACCEPT")
            for port, others in calls.items():
                for other in others:
                    call = (flag, self._ips[other], "-p", "tcp", "--dport", str(port))
                    self.run(name, *begin, *call, "-j", "ACCEPT")
            self.run(name, *begin, "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")

    def stopped_on_the_way_out(self, name: PeerName) -> int:
        """How many packets of further calls the firewall has seen."""
        *_, last = self.run(name, "iptables", "-nvxL", "OUTPUT").strip().splitlines()
        assert "DROP" in last
        return int(last.split()[0])

    def heal(self) -> None:
        for name in self._namespaces:
            self.run(name, "iptables", "-F")

    def names(self, name: PeerName, text: str) -> None:
        """What a site's /etc/hosts says; no other resolver answers it.

        Written in place, since a running process has this very file for its own.
        """
        (self._etc(name) / "hosts").write_text(text)

    def metrics(self, name: PeerName) -> dict[str, float]:
        """As `metrics_of`, on the site's own host."""
        url = f"http://{next(h.http_address for h in self.homes if h.name == name)}/metrics"
        program = (
            f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        )
        lines = self.run(name, START[0], "-c", program).splitlines()
        matches = (re.fullmatch(r"([^#]\S*(?:\{.*\})?) (\S+)", line) for line in lines)
        return {match[1]: float(match[2]) for match in matches if match}

    def run(self, name: PeerName, *command: str) -> str:
        return self._at(self._namespaces[name], *command)

    def _at(self, namespace: str, *command: str) -> str:
        return _run("ip", "netns", "exec", namespace, *command)

    def _filter(self, name: PeerName, *match: str) -> None:
        self.run(name, "iptables", "-A", "INPUT", "-i", DEVICE, *match, "-j", "DROP")

    def _etc(self, name: PeerName) -> Path:
        return NETNS_ETC / self._namespaces[name]

    def _moved(self, home: SiteHome) -> SiteHome:
        """The site, listening on its host's address."""
        settings = home.directory / "node.yaml"
        assert home.address is not None
        text = settings.read_text().replace(home.address, self.address(home.name))
        settings.write_text(text)
        (home.directory / MARK).write_text(self._namespaces[home.name])
        return replace(home, address=self.address(home.name))

    def _plug_in(self, name: PeerName) -> None:
        namespace, port = self._namespaces[name], f"to-{name}"
        etc = self._etc(name)
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # where nobody answers
        _run("ip", "netns", "add", namespace)
        cable = ("peer", "name", DEVICE, "netns", namespace)
        self._at(self._bridge, "ip", "link", "add", port, "type", "veth", *cable)
        self._at(self._bridge, "ip", "link", "set", port, "master", "bridge", "up")
        self.run(name, "ip", "address", "add", f"{self._ips[name]}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            self.run(name, "ip", "link", "set", device, "up")


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return ended.stdout


def _sweep() -> None:
    """Remove what a test has left behind that was killed itself."""
    for line in _run("ip", "netns", "list").splitlines():
        ours = re.match(r"ly-(\d+)-\S+", line)
        if ours and not Path(f"/proc/{ours[1]}").exists():
            _remove(ours[0])


def _remove(namespace: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", namespace)
    shutil.rmtree(NETNS_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        NETNS_ETC.rmdir()  # unless somebody else has something there
