"""A site with a valid certificate and Byzantine behaviour.

It can sign anything in its own name and nothing in another's.  It can repeat whatever it has heard,
to any site and at any time.  Its messages are protobuf, parsed by the product's code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lightyear_node.errors import PeerError
from lightyear_node.protocol.events import Event, Fetched, FetchFailed
from lightyear_node.protocol.parameters import Phase
from lightyear_node.transport import limits, messages
from lightyear_node.types import (
    ROUND_MAX,
    Announcement,
    Digest,
    Evidence,
    Generation,
    Hello,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
)
from tests.sim.real_gossip import FEDERATION, SCHEMA, Answer, Message, digest_of, sign
from tests.sim.world import Reply, World

BEHAVIOURS = (
    "silent",
    "future",
    "stale",
    "split",
    "new_generation",
    "forging",
    "gossip",
    "correct",
    "old_evidence",
    "small_jumps",
    "short_list",
    "slow_bad_updates",
    "clause_flood",
    "mixed",
)
HEARD_MAX = 200
"""Number of other sites' updates kept for replay."""
OLD_ROUNDS = 20
"""How many rounds back its late evidence of equivocation reaches."""


class ByzantineSite:
    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.behaviour = world.conditions.byzantine[name]
        self._highest = Round(0)
        self._generation = Generation(0)
        self._heard: list[SignedManifest] = []
        self._stamp = 0
        self.serves = 0.6
        """Probability that it serves an announced update."""

    def act(self) -> None:
        self.world.after(self.world.between((0.5, 10.0)), self.act)
        behaviour = self._next_behaviour()
        if behaviour == "silent":
            return
        if behaviour == "new_generation":
            self.start_new_generation()
        ahead = self.world.random.choice((1, 2, 10, 10**9))
        round = {
            "future": self._highest + ahead,
            "short_list": self._highest + ahead,
            "stale": max(0, self._highest - 5),
        }.get(behaviour, self._highest + self.world.random.randint(0, 1))
        for index, to in enumerate(self.world.honest):
            face = index % 2 if behaviour == "split" else 0
            update = self.sign(Round(round), f"{self.name}/{self._generation}/{round}/{face}")
            if behaviour == "slow_bad_updates":
                self.world.bad_updates.add(update.digest)
            latest = self.world.manifests[update]
            if behaviour == "forging" and self.world.chance(0.3):
                latest = self._forged()
            if behaviour in ("clause_flood", "small_jumps"):
                self._send(to, self._greeting(to, behaviour))
            self._send(to, self._announcement(latest, behaviour))

    def start_new_generation(self) -> None:
        self._generation = Generation(self._generation + 1)

    def sign(self, round: Round, content: str) -> Update:
        update = Update(self.name, self._generation, round, digest_of(content))
        if update not in self.world.manifests:
            self.world.manifests[update] = sign(update, self._stamp)
        return update

    def announce(self, to: PeerName, update: Update | None, *seen: Update, **more: Any) -> None:
        """Send an announcement, in directed schedules."""
        signed = self.world.manifests
        message = Announcement(
            0,
            Round(0),
            Phase.TRAINING,
            signed[update] if update else None,
            tuple(signed[one] for one in seen),
        )
        self._send(to, replace(message, **more))

    def greet(self, to: PeerName, **more: Any) -> None:
        """Send a hello, in directed schedules."""
        self._send(to, replace(self._greeting(to, "silent"), **more))

    def receive_call(self, by: PeerName, message: Message, reply: Reply) -> None:
        self._learn(message)
        behaviour = self._next_behaviour()
        if behaviour == "silent":
            return
        if isinstance(message, Hello):
            reply(_over_the_wire(self._greeting(by, behaviour)))
        elif behaviour in ("old_evidence", "small_jumps", "slow_bad_updates", "clause_flood"):
            reply(_over_the_wire(self._announcement(None, behaviour)))

    def serve(self, update: Update) -> Event:
        if self.behaviour == "short_list":
            return FetchFailed(update, Reason.CHECKSUM, retriable=False)
        if self.behaviour == "slow_bad_updates" or self.world.chance(self.serves):
            return Fetched(update)
        if self.world.chance(0.5):
            return FetchFailed(update, Reason.CHECKSUM, retriable=False)
        return FetchFailed(update, Reason.TIMEOUT, retriable=True)

    def serving_s(self) -> float | None:
        """Return a delay just short of the others' deadline, if there is one."""
        parameters = self.world.conditions.parameters
        late = self.behaviour == "slow_bad_updates" and parameters.deadline_s > parameters.grace_s
        return parameters.deadline_s - 1.0 if late else None

    def _next_behaviour(self) -> str:
        return (
            self.world.random.choice(BEHAVIOURS[:-1])
            if self.behaviour == "mixed"
            else self.behaviour
        )

    def _send(self, to: PeerName, message: Message) -> None:
        site = self.world.participants[to]
        self.world.send(
            self.name,
            to,
            partial(site.receive_call, self.name, _over_the_wire(message), self._learn),
        )

    def _announcement(self, latest: SignedManifest | None, behaviour: str) -> Announcement:
        # It pretends to train, so that the others wait as long as they can.
        return Announcement(
            self._stamps(behaviour),
            Round(min(self._highest, ROUND_MAX)),
            Phase.TRAINING,
            latest,
            self._reports(behaviour),
            self._evidence(behaviour),
            progress=int(self.world.now),
        )

    def _greeting(self, to: PeerName, behaviour: str) -> Hello:
        noise = self.world.random.getrandbits(64)
        flood = behaviour == "clause_flood"
        return Hello(
            1,
            1,
            FEDERATION,
            digest_of(noise) if flood else Digest("a9" * 32),
            SCHEMA,
            Digest("30" * 32),
            Round(0),
            boot_id=f"{noise:016x}" if flood else self.name,
            wall_time_ns=0,
            lamport=self._stamps(behaviour),
            yours=self._some_update_of(to),
            clauses={f"k{noise + one:x}": "00" * 8 for one in range(limits.CLAUSES_MAX)}
            if flood
            else {},
        )

    def _stamps(self, behaviour: str) -> int:
        """Return the Lamport stamp; `small_jumps` advances it by 2**40 each time."""
        if behaviour == "small_jumps":
            self._stamp = min(self._stamp + 2**40, ROUND_MAX)
        return self._stamp

    def _evidence(self, behaviour: str) -> tuple[Evidence, ...]:
        if behaviour == "forging" and self._heard:
            return (Evidence(self._forged(), self._forged()),)
        if behaviour != "old_evidence" or not self.world.chance(0.1):
            return ()
        old = Round(max(0, self._highest - self.world.random.randint(0, OLD_ROUNDS)))
        pair = [self.sign(old, f"{self.name}/{old}/old {face}") for face in (0, 1)]
        first, second = (self.world.manifests[update] for update in pair)
        return (Evidence(first, second),)

    def _reports(self, behaviour: str) -> tuple[SignedManifest, ...]:
        """Return what it claims to vouch for: some of what it has heard."""
        if behaviour == "forging" and self._heard:
            return (self._forged(),)
        if behaviour not in ("gossip", "split", "correct", "old_evidence"):
            return ()
        known = self._heard[-8:] if behaviour != "gossip" else self._heard
        return tuple(self.world.random.sample(known, min(len(known), 4)))

    def _forged(self) -> SignedManifest:
        """Return a manifest of another site whose signature does not match."""
        if not self._heard:
            update = self.sign(self._highest, f"{self.name}/true")
            return replace(self.world.manifests[update], signature=bytes(64))
        heard = self.world.random.choice(self._heard)
        digest = digest_of("forged", self.world.random.getrandbits(32))
        manifest = heard.manifest
        return replace(
            heard, manifest=replace(manifest, update=replace(manifest.update, digest=digest))
        )

    def _some_update_of(self, peer: PeerName) -> SignedManifest | None:
        known = [signed for signed in self._heard if signed.manifest.update.peer == peer]
        return self.world.random.choice([None, *known])

    def _learn(self, message: Answer) -> None:
        if isinstance(message, PeerError):
            self.world.counts[f"calls of Byzantine sites refused: {message.reason}"] += 1
            return
        if isinstance(message, Announcement) and message.latest is not None:
            self._highest = max(self._highest, message.latest.manifest.update.round)
            if message.latest not in self._heard[-20:]:
                self._heard = [*self._heard[-HEARD_MAX:], message.latest]


def _over_the_wire(message: Message) -> Message:
    """Serialize a message and parse it with the product's code."""
    if isinstance(message, Hello):
        sent = messages.hello_to(message)
        return messages.hello_from(type(sent).FromString(sent.SerializeToString()))
    sent = messages.announcement_to(message)
    return messages.announcement_from(type(sent).FromString(sent.SerializeToString()))
