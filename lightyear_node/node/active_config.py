"""The configuration in force: what the node started with, plus what was reloaded since."""

from __future__ import annotations

from dataclasses import dataclass

from lightyear_node.node.home import Home
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.types import Digest, SignedHead


@dataclass(slots=True)
class ActiveConfig:
    """Shared by all parts that need the present configuration; only `ConfigReload` changes it."""

    home: Home
    parameters: Parameters
    """The part of the configuration that the barrier runs on."""

    def sign_head(self, seq: int, hash: Digest) -> SignedHead:
        """Sign the journal's newest record with the key in force."""
        return self.home.identity.sign_head(self.home.federation.federation, seq, hash)
