"""The settings in force, and what becomes of those that an operator changes while the node runs.

`reload` says what has changed; here every part of the node is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lightyear_node.archive import Archive
from lightyear_node.barrier import Event, Reformed, Terms
from lightyear_node.conversation import Conversation, Facts
from lightyear_node.diary import Diary
from lightyear_node.errors import ConfigError, DiskFull
from lightyear_node.home import Home
from lightyear_node.ledger import Ledger
from lightyear_node.links import Links, Spawn
from lightyear_node.observe.observer import Observer
from lightyear_node.reload import Watch, adopted, compare
from lightyear_node.reporting import Reporting
from lightyear_node.space import Space


@dataclass
class Settings:
    home: Home
    terms: Terms
    """What of them the barrier runs on."""
    facts: Facts
    """What of them is compared with the peers'."""
    ledger: Ledger
    archive: Archive
    diary: Diary
    space: Space
    conversation: Conversation
    links: Links
    observer: Observer
    reporting: Reporting
    tell: Callable[[Event], None]
    spawn: Spawn

    def __post_init__(self) -> None:
        self._postponed: tuple[str, ...] = ()

    async def follow(self, watch: Watch) -> None:
        while True:
            self.adopt(await watch.changed())

    def adopt(self, found: Home) -> None:
        """Act on changed settings as far as a running node can."""
        changes = compare(self.home, found)
        if changes.postponed and changes.postponed != self._postponed:
            text = "takes effect after a restart: %s"
            postponed = ", ".join(changes.postponed)
            self.observer.log.warning(text, postponed, extra={"event": "settings"})
        self._postponed = changes.postponed
        if not changes:
            return
        home = self.home = self.reporting.home = adopted(self.home, found)
        self.facts = replace(
            self.facts, agreement=home.agreement.digest(), clauses=home.agreement.clauses()
        )
        record = partial(
            self.ledger.settings,
            changes.to_plain(),
            certificate=home.identity.fingerprint,
            agreement=self.facts.agreement,
        )
        try:
            record()
        except DiskFull:
            # Whoever is removed is cut off now, and not when there is room to write it down.
            self.spawn(self.space.record(record))
        self.archive.agree(home.certificates)
        self.conversation.agree(self.facts)
        for peer in changes.removed:
            self.diary.forget(peer)
        self.links.replace(home, changes, self.spawn)
        expires = home.identity.certificate.expires.timestamp()
        rounds = home.agreement.rounds
        self.observer.reconfigured(str(changes), expires, home.others, rounds)
        if changes.removed or changes.joined or changes.terms:
            self.tell(self._reformed(home))

    def _reformed(self, home: Home) -> Reformed:
        try:
            self.terms = home.terms()
        except ConfigError as problem:
            # Whoever was removed is gone at once all the same; the rounds wait for better terms.
            text = "with these settings it will not start again: %s"
            self.observer.log.warning(text, problem, extra={"event": "settings"})
            return Reformed(self.terms, self.terms.peers - set(home.others))
        return Reformed(self.terms)
