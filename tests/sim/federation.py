"""The simulated environment with its honest and Byzantine sites."""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.types import PeerName
from tests.sim.byzantine_site import ByzantineSite
from tests.sim.disk import Disk
from tests.sim.site import Site
from tests.sim.world import Conditions, World


class Federation(World):
    def __init__(
        self, conditions: Conditions, seed: int | str, new_disk: Callable[[], Disk] = Disk
    ) -> None:
        super().__init__(conditions, seed, new_disk)
        self.sites: dict[PeerName, Site] = {name: Site(name, self) for name in self.honest}
        self.byzantine: dict[PeerName, ByzantineSite] = {
            name: ByzantineSite(name, self) for name in conditions.byzantine
        }
        self.participants = {**self.sites, **self.byzantine}
