"""Which settings an operator has changed while the node runs.

Decides which settings can change in a running node: members, their certificates and addresses,
when rounds close, and the number of rounds.  Whatever a model depends on waits for a restart.
  Must not know how a change is carried out: `config_reload` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from lightyear_node.config.node import NODE_FILE
from lightyear_node.node.home import Home
from lightyear_node.types import Fingerprint, PeerName

LIVE = ("rounds", "barrier")
"""The keys of peers.yaml, besides `peers`, that a running node can change."""

Pin = tuple[PeerName, Fingerprint]


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """The difference between the configuration in force and the files; true if any applies now."""

    renewed: bool = False
    """This site has a new certificate."""
    removed: tuple[PeerName, ...] = ()
    joined: tuple[PeerName, ...] = ()
    moved: tuple[PeerName, ...] = ()
    """Peers with a new address."""
    pinned: tuple[Pin, ...] = ()
    unpinned: tuple[Pin, ...] = ()
    """Certificates that were added and removed, ours included; not those of removed peers."""
    live_settings: tuple[str, ...] = ()
    """Changed settings of the rounds, by key."""
    postponed: tuple[str, ...] = ()
    """Settings that take effect after a restart, by key."""

    def __bool__(self) -> bool:
        changed = (
            self.removed,
            self.joined,
            self.moved,
            self.pinned,
            self.unpinned,
            self.live_settings,
        )
        return self.renewed or any(changed)

    def distrusted(self) -> frozenset[PeerName]:
        """Peers whose connections must be closed at once."""
        return frozenset(self.removed) | {peer for peer, _ in self.unpinned}

    def affected(self) -> frozenset[PeerName]:
        """Peers that need a new connection; all of them if `renewed`."""
        pins = {peer for peer, _ in (*self.pinned, *self.unpinned)}
        return frozenset({*self.removed, *self.joined, *self.moved, *pins})

    def to_plain(self) -> dict[str, Any]:
        """The changes as the journal records them."""
        plain = {
            "removed": list(self.removed),
            "joined": list(self.joined),
            "moved": list(self.moved),
            "pinned": [list(pin) for pin in self.pinned],
            "unpinned": [list(pin) for pin in self.unpinned],
            "terms": list(self.live_settings),
        }
        return {key: value for key, value in plain.items() if value}

    def __str__(self) -> str:
        words = ["we have a new certificate"] * self.renewed
        words += [f"{peer} is removed" for peer in self.removed]
        words += [f"{peer} has joined" for peer in self.joined]
        words += [f"{peer} has another address" for peer in self.moved]
        words += [f"{pin} of {peer} is accepted" for peer, pin in self.pinned]
        words += [f"{pin} of {peer} is no longer accepted" for peer, pin in self.unpinned]
        words += [f"`{key}` has another value" for key in self.live_settings]
        return ", ".join(words)


def compare(running: Home, found: Home) -> ConfigChanges:
    if found.us != running.us:
        return ConfigChanges(postponed=(f"our new name {found.us}",))
    # By name: `others` depends on the rule, which only a restart changes.
    listed = set() if running.rule.alone else set(found.certificates) - {found.us}
    before = set(running.others)
    staying = before & listed
    addresses = {peer: running.address_of(peer) for peer in staying}
    settings = list(_differing(running.federation, found.federation))
    live_settings = [key for key in settings if _is_live(key)]
    postponed = [key for key in settings if not _is_live(key)]
    postponed += [f"{NODE_FILE}: {key}" for key in _differing(running.config, found.config)]
    return ConfigChanges(
        renewed=found.identity.fingerprint != running.identity.fingerprint,
        removed=tuple(sorted(before - listed)),
        joined=tuple(sorted(listed - before)),
        moved=tuple(peer for peer, at in addresses.items() if found.address_of(peer) != at),
        pinned=tuple(_more(sorted({*staying, running.us}), found, running)),
        unpinned=tuple(_more(sorted({*staying, running.us}), running, found)),
        live_settings=tuple(live_settings),
        postponed=tuple(postponed),
    )


def adopted(running: Home, found: Home) -> Home:
    """The running configuration with everything of `found` that needs no restart."""
    live = {key: getattr(found.federation, key) for key in ("peers", *LIVE)}
    return replace(
        running,
        federation=running.federation.model_copy(update=live),
        identity=found.identity,
        certificates=found.certificates,
    )


def _is_live(key: str) -> bool:
    return key.partition(".")[0] in LIVE


def _more(peers: Sequence[PeerName], one: Home, other: Home) -> Iterator[Pin]:
    """The certificates that `one` has and `other` has not."""
    for peer in peers:
        known = {certificate.fingerprint for certificate in other.certificates[peer]}
        pins = (certificate.fingerprint for certificate in one.certificates[peer])
        yield from ((peer, pin) for pin in pins if pin not in known)


def _differing(old: BaseModel, new: BaseModel) -> Iterator[str]:
    """Keys with different values, nested ones as `table.key`; `peers` is compared elsewhere."""
    for key in type(old).model_fields:
        before, after = getattr(old, key), getattr(new, key)
        if key == "peers" or before == after:
            continue
        if isinstance(before, BaseModel) and type(before) is type(after):
            yield from (f"{key}.{inner}" for inner in _differing(before, after))
        else:
            yield key
