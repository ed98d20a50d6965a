"""A history in words: what a person would want to read of what sites were told and did."""

from __future__ import annotations

from collections.abc import Iterable

from lightyear_node.barrier import (
    Accuse,
    Accused,
    Alarm,
    Announce,
    Announced,
    Answered,
    Blocked,
    Commit,
    Decide,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Judge,
    Merge,
    Note,
    Pardoned,
    Paused,
    Reformed,
    Reported,
    Seal,
    Train,
)
from lightyear_node.records import PeerName, Update
from tests.sim.site import Fate
from tests.sim.world import Told


class Storyteller:
    """Tells what is new: what is said again at every heartbeat is told once.

    In `brief` sites are not seen to hear of each other's updates and to fetch them, except where
    one learns of its own past.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self._brief = brief
        self._names: dict[tuple[PeerName, str], str] = {}
        self._generations: dict[tuple[PeerName, int], int] = {}
        self._said: dict[tuple[PeerName, str], object] = {}

    def line(self, told: Told) -> str | None:
        now, name, what = told
        words = self._words(name, what)
        return f"{now - 1000:7.1f} {name} {words}" if words else None

    def _words(self, name: PeerName, what: object) -> str | None:
        match what:
            case Fate(words):
                if words == "starts":
                    self._said = {key: said for key, said in self._said.items() if key[0] != name}
                return words
            case Greet():
                return self._news(name, "greets", True, "looks for the others")
            case Answered(peer, yours):
                text = f"is answered by {peer}"
                text += f", which holds its {self._update(yours)}" if yours else ""
                return self._news(name, f"answered {peer}", yours, text)
            case Train(round):
                return f"trains for round {round}"
            case Seal(update):
                self._said[(name, f"own {update.digest}")] = True
                return f"seals {self._update(update)} of round {update.round}"
            case Announce(update):
                text = f"announces {self._update(update)}" if update else "announces that it lives"
                return self._news(name, "announces", update, text)
            case Announced() | Fetch() | Fetched() | FetchFailed() if self._brief:
                return None
            case Merge() if self._brief and self._said.pop((name, "decides"), None):
                return None
            case Decide():
                self._said[(name, "decides")] = True
            case Announced(update):
                text = f"hears of {self._update(update)} from {update.peer}"
                return self._news(name, f"hears {update.peer}", update, text)
            case Reported(by, updates):
                return self._reported(name, by, updates)
            case Fetch(update):
                return self._news(
                    name, f"fetch {update.peer}", update, f"fetches {self._update(update)}"
                )
            case Fetched(update):
                return f"has fetched {self._update(update)}"
            case FetchFailed(update, reason):
                text = f"cannot fetch {self._update(update)}: {reason}"
                return self._news(name, f"fail {update.peer}", update, text)
            case Accused(first):
                return self._news(
                    name,
                    f"accused {first.peer}",
                    first.age,
                    f"is shown two stories of {first.peer}",
                )
        return self._acts(what)

    def _acts(self, what: object) -> str | None:
        match what:
            case Judge(round, updates, missing, _, why):
                text = f"closes round {round}: {why}"
                text += f"; judges {self._list(updates)}" if updates else ""
                reasons = ", ".join(f"{peer} {reason}" for peer, reason in missing)
                return f"{text}; not {reasons}" if missing else text
            case Decide(decision):
                return f"decides round {decision.round}: {self._list(decision.accepted)}"
            case Merge(decision):
                return f"merges {self._list(decision.accepted)} in round {decision.round}"
            case Commit(round):
                return f"commits round {round}"
            case Note(kind, about):
                return None if kind == "witness" else self._note(kind, about)
            case Accuse(first, second):
                two = f"{self._update(first)} and {self._update(second)}"
                return f"quarantines {first.peer}: {two} are both of round {first.round}"
            case Alarm(kind, text):
                return f"alarm ({kind}): {text}"
            case Finish():
                return "has finished"
            case Paused(paused):
                return "is told to pause" if paused else "is told to go on"
            case Blocked(peers):
                return f"is told to block {', '.join(sorted(peers)) or 'nobody'}"
            case Pardoned(peer):
                return f"is told to pardon {peer}"
            case Reformed(terms):
                return f"is told that its peers are {', '.join(sorted(terms.peers))}"
        return None

    def _note(self, kind: str, about: object) -> str:
        if kind == "generation" and isinstance(about, dict):
            return f"begins a new generation in round {about['round']}"
        return f"notes: {kind}"

    def _reported(self, name: PeerName, by: PeerName, updates: tuple[Update, ...]) -> str | None:
        if self._brief:
            updates = tuple(one for one in updates if one.peer == name)
        news = [one for one in updates if self._said.get((name, f"{by} on {one.peer}")) != one]
        newest: dict[PeerName, Update] = {}
        for one in news:
            newest[one.peer] = max(newest.get(one.peer, one), one, key=lambda u: u.age)
        self._said.update({(name, f"{by} on {one.peer}"): one for one in newest.values()})
        told = [one for one in newest.values() if one in news]
        if self._brief:
            told = [one for one in told if not self._knows(name, one)]
        return f"is told by {by} of {self._list(tuple(told))}" if told else None

    def _knows(self, name: PeerName, update: Update) -> bool:
        """Whether a site has sealed its update in this life, or was told of it before."""
        return self._said.setdefault((name, f"own {update.digest}"), update) is not update

    def _news(self, name: PeerName, topic: str, what: object, text: str) -> str | None:
        known = (name, topic) in self._said and self._said[(name, topic)] == what
        self._said[(name, topic)] = what
        return None if known else text

    def _list(self, updates: tuple[Update, ...]) -> str:
        return ", ".join(self._update(update) for update in updates) or "nothing"

    def _update(self, update: Update | None) -> str:
        """`b5`: of site-b, round 5; `b5'` for another digest of that round, `b5+1` for another
        generation."""
        if update is None:
            return "nothing"
        short = update.peer.removeprefix("site-")
        lives = [life for peer, life in self._generations if peer == update.peer]
        if update.generation not in lives:
            self._generations[(update.peer, update.generation)] = len(lives)
        life = self._generations[(update.peer, update.generation)]
        name = f"{short}{update.round}" + (f"+{life}" if life else "")
        key = (update.peer, update.digest)
        if key not in self._names:
            while name in self._names.values():
                name += "'"
            self._names[key] = name
        return self._names[key]


def tell(
    history: Iterable[Told],
    about: Iterable[PeerName] = (),
    last: int | None = None,
    *,
    brief: bool = False,
) -> str:
    """The story of some sites, or of all; names are given from the beginning of the history."""
    teller, wanted = Storyteller(brief=brief), set(about)
    lines = [(told[1], line) for told in history if (line := teller.line(told))]
    chosen = [line for name, line in lines if not wanted or name in wanted]
    return "\n".join(chosen[-last:] if last else chosen)
