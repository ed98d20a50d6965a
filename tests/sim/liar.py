"""A site with a valid certificate that says whatever its habit is, at any time.

It can sign anything in its own name and nothing in another's; it can repeat whatever it has heard,
to whom it likes and as late as it likes.
"""

from __future__ import annotations

from functools import partial

from lightyear_node.barrier import Event, Fetched, FetchFailed, Phase
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update
from tests.sim.world import Message, World

HABITS = ("silent", "future", "stale", "split", "reborn", "forging", "gossip", "good", "fickle")
KEPT = 200
"""Updates of others that it could repeat."""


class Liar:
    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.habit = world.conditions.liars[name]
        self._highest = Round(0)
        self._generation = Generation(0)
        self._heard: list[Update] = []
        self.serves = 0.6
        """How often it sends what it has announced."""

    def act(self) -> None:
        self.world.after(self.world.between((0.5, 10.0)), self.act)
        habit = self._mood()
        if habit == "silent":
            return
        if habit == "reborn":
            self.be_reborn()
        ahead = self.world.random.choice((1, 2, 10, 10**9))
        round = {"future": self._highest + ahead, "stale": max(0, self._highest - 5)}.get(
            habit, self._highest + self.world.random.randint(0, 1)
        )
        for index, to in enumerate(self.world.honest):
            face = index % 2 if habit == "split" else 0
            update = self.sign(Round(round), f"{self.name}/{self._generation}/{round}/{face}")
            if habit == "forging" and self.world.chance(0.3):
                update = self._forged()
            announced = self.world.participants[to].announced
            self.world.send(self.name, to, partial(announced, self._words(update, habit)))

    def be_reborn(self) -> None:
        self._generation = Generation(self._generation + 1)

    def sign(self, round: Round, digest: str) -> Update:
        update = Update(self.name, self._generation, round, Digest(digest))
        self.world.signed.add(update)
        return update

    def say(self, to: PeerName, update: Update | None, *seen: Update) -> None:
        """By hand, for directed stories."""
        message = Message(self.name, update, Phase.TRAINING, 0, seen)
        self.world.send(self.name, to, partial(self.world.participants[to].announced, message))

    def greeted(self, message: Message) -> None:
        self._listen(message)
        habit = self._mood()
        if habit != "silent":
            answered = self.world.participants[message.by].answered
            words = self._words(None, habit, yours=self._some_update_of(message.by))
            self.world.send(self.name, message.by, partial(answered, words))

    def announced(self, message: Message) -> None:
        self._listen(message)

    def answered(self, message: Message) -> None:
        self._listen(message)

    def replied(self, message: Message) -> None:
        self._listen(message)

    def serve(self, update: Update) -> Event:
        if self.world.chance(self.serves):
            return Fetched(update)
        if self.world.chance(0.5):
            return FetchFailed(update, Reason.CHECKSUM, retriable=False)
        return FetchFailed(update, Reason.TIMEOUT, retriable=True)

    def _mood(self) -> str:
        return self.world.random.choice(HABITS[:-1]) if self.habit == "fickle" else self.habit

    def _words(self, update: Update | None, habit: str, yours: Update | None = None) -> Message:
        # It pretends to be at work, so that the others wait for it as long as they can.
        return Message(
            self.name,
            update,
            Phase.TRAINING,
            int(self.world.now),
            self._reports(habit),
            ((self._forged(), self._forged()),) if habit == "forging" and self._heard else (),
            yours,
        )

    def _reports(self, habit: str) -> tuple[Update, ...]:
        """What it claims to vouch for: some of what it has heard, now and then the old."""
        if habit == "forging" and self._heard:
            return (self._forged(),)
        if habit not in ("gossip", "split", "good"):
            return ()
        known = self._heard[-8:] if habit != "gossip" else self._heard
        return tuple(self.world.random.sample(known, min(len(known), 4)))

    def _forged(self) -> Update:
        """In the name of somebody else, and without a signature."""
        if not self._heard:
            return Update(self.name, self._generation, self._highest, Digest("forged"))
        heard = self.world.random.choice(self._heard)
        noise = self.world.random.getrandbits(32)
        return Update(heard.peer, heard.generation, heard.round, Digest(f"forged/{noise:08x}"))

    def _some_update_of(self, peer: PeerName) -> Update | None:
        known = [update for update in self._heard if update.peer == peer]
        return self.world.random.choice([None, *known])

    def _listen(self, message: Message) -> None:
        if message.update is not None:
            self._highest = max(self._highest, message.update.round)
            if message.update not in self._heard[-20:]:
                self._heard = [*self._heard[-KEPT:], message.update]
