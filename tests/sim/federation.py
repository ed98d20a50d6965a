"""A world with its sites and liars in it."""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.records import PeerName
from tests.sim.disk import Disk
from tests.sim.liar import Liar
from tests.sim.site import Site
from tests.sim.world import Conditions, World


class Federation(World):
    def __init__(
        self, conditions: Conditions, seed: int | str, new_disk: Callable[[], Disk] = Disk
    ) -> None:
        super().__init__(conditions, seed, new_disk)
        self.sites: dict[PeerName, Site] = {name: Site(name, self) for name in self.honest}
        self.liars: dict[PeerName, Liar] = {name: Liar(name, self) for name in conditions.liars}
        self.participants = {**self.sites, **self.liars}
