"""For the tests of bad networks: models whose transfer takes seconds, and observing transfers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from lightyear_node.config.federation import BarrierConfig, ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import SiteHome, Statuses, lay_out, site_names
from lightyear_node.storage.hash_chain import Record
from lightyear_node.storage.journal import Journal
from lightyear_node.types import PeerName
from tests.support.bad_network_proxy import ChaosProxy
from tests.support.journal_records import first_bad_record, read_records

MIB = 1 << 20
PARTIAL_FILE = re.compile(r"[0-9a-f]{64}\.part$")
"""A partial download is named by its digest; files that a worker writes are not."""
AVERAGE = RuleConfig(name="fedavg")
"""Accepts every update: these tests are not about verdicts."""
HASTY = BarrierConfig(min_peers=1, faulty_max=0, heartbeat=0.5, grace=2.0, suspect=4.0, observe=2.0)

HEAVY = """
import torch
from torch import nn
from lightyear_node.lab.tasks import digits


class Heavy(nn.Module):
    # Random values hardly compress; the first few are trained, so that every update differs.
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
    barrier: BarrierConfig = HASTY,
    exchange: ExchangeConfig | None = None,
) -> list[SiteHome]:
    """Sites whose updates have `mib` MiB, and whose training takes no time."""
    homes = lay_out(
        folder,
        site_names(sites),
        rounds=rounds,
        barrier=barrier,
        rule=AVERAGE,
        task=TaskConfig(entry="heavy:build", args={"mib": mib}),
        exchange=exchange,
    )
    for home in homes:
        (home.directory / "heavy.py").write_text(HEAVY)
    return homes


def readdress(homes: list[SiteHome], addresses: Mapping[PeerName, str]) -> None:
    """Replace the addresses in every site's peers.yaml."""
    for home in homes:
        peers = home.directory / "peers.yaml"
        text = peers.read_text()
        for other in homes:
            assert other.address is not None
            text = text.replace(other.address, addresses.get(other.name, other.address))
        peers.write_text(text)


@contextmanager
def behind_proxies(homes: list[SiteHome]) -> Iterator[dict[PeerName, ChaosProxy]]:
    """Put a proxy in front of every site, for all calls to it."""
    with ExitStack() as stack:
        proxies = {home.name: stack.enter_context(ChaosProxy(home.address or "")) for home in homes}
        readdress(homes, {name: proxy.address for name, proxy in proxies.items()})
        yield proxies


def part_bytes(home: SiteHome) -> int:
    """Bytes received so far of an update that is being downloaded."""
    sizes = []
    for part in (home.state_dir / "updates").glob(f"{'[0-9a-f]' * 64}.part"):
        try:
            sizes.append(part.stat().st_size)
        except FileNotFoundError:  # it has just been completed
            sizes.append(0)
    return max(sizes, default=0)


def opens_no_part(statuses: Statuses) -> None:
    """Check that no worker has a partial download open."""
    for status in statuses.values():
        try:
            if status is not None and status["worker_pid"]:
                worker = psutil.Process(status["worker_pid"])
                paths = [file.path for file in worker.open_files()]
                paths += [mapped.path for mapped in worker.memory_maps()]
                assert not [path for path in paths if PARTIAL_FILE.search(path)]
        except psutil.Error:
            pass  # it has just ended


def history(home: SiteHome) -> list[Record]:
    """The journal of a site, whose node may be running; checks its hash chain."""
    journal = Journal(home.state_dir / "journal.db")
    try:
        assert first_bad_record(journal) is None
        return read_records(journal)
    finally:
        journal.close()


def counted(metrics: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum of a counter's series with these labels."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(
        value
        for series, value in metrics.items()
        if series.partition("{")[0] == f"lightyear_{name}_total"
        and wanted <= set(re.findall(r'\w+="[^"]*"', series))
    )
