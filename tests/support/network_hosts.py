"""One host per site: network namespaces joined by a bridge.

Every site has its own address.  The links between sites can be cut, made lossy or slowed down.  The
bridge has its own namespace, too: no packet reaches the machine's network, whose configuration is
not changed.  Needs root, `ip`, `tc` and `iptables`; `why_not` names what is missing.
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
from lightyear_node.types import PeerName
from tests.support.needs import missing_tool

Calls = Mapping[int, Collection[PeerName]]
"""Peers by port."""

PORT = 7000
DEVICE = "eth0"
NETNS_ETC = Path("/etc/netns")
"""`ip netns exec` mounts the files of a namespace's folder here over those in /etc."""
NAMESPACE_FILE = "netns"
"""In a site's home: the name of its namespace."""
START_ON_HOST = ("sh", "-c", f'exec ip netns exec "$(cat {NAMESPACE_FILE})" "$@"', "sh", *START)
"""Starts a site on its host.  The shell and `ip` exec, so the site keeps the known PID."""


def why_not(*tools: str) -> str | None:
    """Name what this machine lacks for such hosts and these tools, if anything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = missing_tool("ip", "tc", "iptables", *tools)
    if missing is not None:
        return missing
    trial = f"ly-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode != 0:
        return f"cannot create a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", trial], check=True)
    return None


class Hosts:
    """One host for each site; a context manager that removes everything it created."""

    def __init__(self, homes: Sequence[SiteHome]) -> None:
        self._namespaces = {home.name: f"ly-{os.getpid()}-{home.name}" for home in homes}
        self._bridge = f"ly-{os.getpid()}-bridge"
        self._gateways: list[str] = []
        self._ips = {home.name: f"10.77.0.{n}" for n, home in enumerate(homes, start=1)}
        self.homes = [self._relocated(home) for home in homes]

    def __enter__(self) -> Self:
        _remove_stale()
        try:
            _run("ip", "netns", "add", self._bridge)
            self._at(self._bridge, "ip", "link", "add", "bridge", "type", "bridge")
            self._at(self._bridge, "ip", "link", "set", "bridge", "up")
            for name in self._namespaces:
                self._connect(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*self._namespaces.values(), *self._gateways, self._bridge):
            _remove(namespace)

    def federation(self) -> Federation:
        return Federation(self.homes, START_ON_HOST)

    def address(self, name: PeerName) -> str:
        return f"{self._ips[name]}:{PORT}"

    def ip(self, name: PeerName) -> str:
        return self._ips[name]

    def drop_from(self, name: PeerName, sender: PeerName) -> None:
        """Drop every packet from `sender` to `name`."""
        self._filter(name, "-s", self._ips[sender])

    def block_calls(self, name: PeerName, caller: PeerName) -> None:
        """Drop connections from `caller` to `name`'s port; `name` can still call `caller`."""
        self._filter(name, "-s", self._ips[caller], "-p", "tcp", "--dport", str(PORT))

    def partition(self, *groups: Collection[PeerName]) -> None:
        """Cut the network between groups of sites, in both directions."""
        for group in groups:
            others = [name for other in groups if other is not group for name in other]
            for name in group:
                for other in others:
                    self.drop_from(name, other)

    def drop_packets(self, share: float) -> None:
        """Drop this share of the packets to every site."""
        for name in self._namespaces:
            self._filter(name, "-m", "statistic", "--mode", "random", "--probability", f"{share}")

    def slow_down(self, name: PeerName, rate: str) -> None:
        """Limit a site's outgoing traffic to this rate, such as `1mbit`."""
        bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        self.run(name, "tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket)

    def put_behind_nat(self, name: PeerName, port: int) -> None:
        """Add a NAT gateway that takes the host's address and forwards one port to it."""
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

    def allow_only(self, name: PeerName, calls_in: Calls, calls_out: Calls) -> None:
        """Allow only these incoming and outgoing connections, by port; drop all others."""
        for chain, flag, calls in (("INPUT", "-s", calls_in), ("OUTPUT", "-d", calls_out)):
            begin = ("iptables", "-A", chain)
            self.run(name, *begin, "-i" if chain == "INPUT" else "-o", "lo", "-j", "ACCEPT")
            for port, others in calls.items():
                for other in others:
                    call = (flag, self._ips[other], "-p", "tcp", "--dport", str(port))
                    self.run(name, *begin, *call, "-j", "ACCEPT")
            self.run(name, *begin, "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")

    def dropped_outgoing(self, name: PeerName) -> int:
        """Return how many packets of other outgoing connections the firewall dropped."""
        *_, last = self.run(name, "iptables", "-nvxL", "OUTPUT").strip().splitlines()
        assert "DROP" in last
        return int(last.split()[0])

    def heal(self) -> None:
        for name in self._namespaces:
            self.run(name, "iptables", "-F")

    def set_hosts_file(self, name: PeerName, text: str) -> None:
        """Set a site's /etc/hosts, its only name resolution.

        Written in place: a running process has this inode mounted.
        """
        (self._etc(name) / "hosts").write_text(text)

    def metrics(self, name: PeerName) -> dict[str, float]:
        """Read the metrics as `metrics_of` does, on the site's host."""
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

    def _relocated(self, home: SiteHome) -> SiteHome:
        """Return the site with its host's address written to its settings."""
        settings = home.directory / "node.yaml"
        assert home.address is not None
        text = settings.read_text().replace(home.address, self.address(home.name))
        settings.write_text(text)
        (home.directory / NAMESPACE_FILE).write_text(self._namespaces[home.name])
        return replace(home, address=self.address(home.name))

    def _connect(self, name: PeerName) -> None:
        namespace, port = self._namespaces[name], f"to-{name}"
        etc = self._etc(name)
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nothing listens there
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


def _remove_stale() -> None:
    """Remove the namespaces of test processes that no longer exist."""
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
        NETNS_ETC.rmdir()  # unless other files are there
