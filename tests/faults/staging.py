"""What the tests of bad networks have in common: a model that travels for seconds, and how to see
it travelling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from proxy import ChaosProxy

from lightyear_node.config.agreement import BarrierTerms, ExchangeTerms, RuleTerms
from lightyear_node.config.site import TaskEntry
from lightyear_node.journal import Journal, Record
from lightyear_node.lab.federation import SiteHome, Statuses, lay_out, site_names
from lightyear_node.records import PeerName

MIB = 1 << 20
ARRIVING = re.compile(r"[0-9a-f]{64}\.part$")
"""A partial file bears its digest; that which a worker is just writing does not know its own."""
AVERAGE = RuleTerms(name="fedavg")
"""These tests are not about who is accepted."""
HASTY = BarrierTerms(min_peers=1, faulty_max=0, heartbeat=0.5, grace=2.0, suspect=4.0, observe=2.0)

HEAVY = """
import torch
from torch import nn
from lightyear_node.tasks import digits


class Heavy(nn.Module):
    # Random bytes hardly shrink on the wire; the first few of them learn, so every update differs.
    def __init__(self, mib):
        super().__init__()
        self.ballast = nn.Parameter(torch.randn(mib << 18))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        return self.net(images) * (1 + self.ballast[:64].mean())


def build(mib, site_index=0, site_count=1, seed=0):
    task = digits.build(site_index, site_count, seed, epochs=1, batch_size=4096)
    task.model = lambda: Heavy(mib)
    task.optimizer = lambda parameters: torch.optim.SGD(parameters, 0.1)
    return task
"""


def lay_out_heavy(
    folder: Path,
    sites: int,
    *,
    mib: int,
    rounds: int,
    barrier: BarrierTerms = HASTY,
    exchange: ExchangeTerms | None = None,
) -> list[SiteHome]:
    """Sites whose updates have so many MiB, and train in an instant."""
    homes = lay_out(
        folder,
        site_names(sites),
        rounds=rounds,
        barrier=barrier,
        rule=AVERAGE,
        task=TaskEntry(entry="heavy:build", args={"mib": mib}),
        exchange=exchange,
    )
    for home in homes:
        (home.directory / "heavy.py").write_text(HEAVY)
    return homes


def readdress(homes: list[SiteHome], addresses: Mapping[PeerName, str]) -> None:
    """Let every site look for the others elsewhere than where they listen."""
    for home in homes:
        peers = home.directory / "peers.yaml"
        text = peers.read_text()
        for other in homes:
            assert other.address is not None
            text = text.replace(other.address, addresses.get(other.name, other.address))
        peers.write_text(text)


@contextmanager
def behind_proxies(homes: list[SiteHome]) -> Iterator[dict[PeerName, ChaosProxy]]:
    """A proxy in front of every site, on the way of all calls to it."""
    with ExitStack() as stack:
        proxies = {home.name: stack.enter_context(ChaosProxy(home.address or "")) for home in homes}
        readdress(homes, {name: proxy.address for name, proxy in proxies.items()})
        yield proxies


def part_bytes(home: SiteHome) -> int:
    """How much has arrived here of an update that is still on its way."""
    sizes = []
    for part in (home.state_dir / "updates").glob(f"{'[0-9a-f]' * 64}.part"):
        try:
            sizes.append(part.stat().st_size)
        except FileNotFoundError:  # it has just become whole
            sizes.append(0)
    return max(sizes, default=0)


def opens_no_part(statuses: Statuses) -> None:
    """What is half here is nothing to the workers, which judge and merge."""
    for status in statuses.values():
        try:
            if status is not None and status["worker_pid"]:
                worker = psutil.Process(status["worker_pid"])
                paths = [file.path for file in worker.open_files()]
                paths += [mapped.path for mapped in worker.memory_maps()]
                assert not [path for path in paths if ARRIVING.search(path)]
        except psutil.Error:
            pass  # it has just ended


def history(home: SiteHome) -> list[Record]:
    """A site's journal, read beside the running node; its chain must hold."""
    journal = Journal(home.state_dir / "journal.db")
    try:
        assert journal.first_bad_record() is None
        return list(journal.records())
    finally:
        journal.close()


def counted(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum of a counter's series that have these labels."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(
        value
        for series, value in metrics.items()
        if series.partition("{")[0] == f"lightyear_{name}_total"
        and wanted <= set(re.findall(r'\w+="[^"]*"', series))
    )
