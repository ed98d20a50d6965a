"""Formats a history as a transcript for people: what sites received and did."""

from __future__ import annotations

from collections.abc import Iterable

from lightyear_node.protocol.events import (
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
    Paused,
    Reconfigured,
    Reported,
    Seal,
    Train,
    Unquarantined,
)
from lightyear_node.types import PeerName, Update
from tests.sim.site import ExternalEvent
from tests.sim.world import HistoryEntry


class TranscriptWriter:
    """Formats entries; what repeats at every heartbeat is shown once.

    `brief` omits announcements received and fetches, except reports on a site's own past.
    """

    def __init__(self, *, brief: bool = False) -> None:
        self._brief = brief
        self._names: dict[tuple[PeerName, str], str] = {}
        self._generations: dict[tuple[PeerName, int], int] = {}
        self._shown: dict[tuple[PeerName, str], object] = {}

    def line(self, entry: HistoryEntry) -> str | None:
        now, name, what = entry
        text = self._describe(name, what)
        return f"{now - 1000:7.1f} {name} {text}" if text else None

    def _describe(self, name: PeerName, what: object) -> str | None:
        match what:
            case ExternalEvent(text):
                if text == "starts":
                    self._shown = {
                        key: shown for key, shown in self._shown.items() if key[0] != name
                    }
                return text
            case Greet():
                return self._news(name, "greets", True, "greets the others")
            case Answered(peer, yours):
                text = f"is answered by {peer}"
                text += f", which holds its {self._update(yours)}" if yours else ""
                return self._news(name, f"answered {peer}", yours, text)
            case Train(round):
                return f"trains for round {round}"
            case Seal(update):
                self._shown[(name, f"own {update.digest}")] = True
                return f"seals {self._update(update)} of round {update.round}"
            case Announce(update):
                text = f"announces {self._update(update)}" if update else "announces its presence"
                return self._news(name, "announces", update, text)
            case Announced() | Fetch() | Fetched() | FetchFailed() if self._brief:
                return None
            case Merge() if self._brief and self._shown.pop((name, "decides"), None):
                return None
            case Decide():
                self._shown[(name, "decides")] = True
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
                    f"receives proof that {first.peer} signed twice",
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
                return "is paused by its operator" if paused else "is resumed by its operator"
            case Blocked(peers):
                return f"is set to block {', '.join(sorted(peers)) or 'no peer'}"
            case Unquarantined(peer):
                return f"is set to pardon {peer}"
            case Reconfigured(parameters):
                return f"is configured with the peers {', '.join(sorted(parameters.peers))}"
        return None

    def _note(self, kind: str, about: object) -> str:
        if kind == "generation" and isinstance(about, dict):
            return f"begins a new generation in round {about['round']}"
        return f"notes: {kind}"

    def _reported(self, name: PeerName, by: PeerName, updates: tuple[Update, ...]) -> str | None:
        if self._brief:
            updates = tuple(one for one in updates if one.peer == name)
        news = [one for one in updates if self._shown.get((name, f"{by} on {one.peer}")) != one]
        newest: dict[PeerName, Update] = {}
        for one in news:
            newest[one.peer] = max(newest.get(one.peer, one), one, key=lambda u: u.age)
        self._shown.update({(name, f"{by} on {one.peer}"): one for one in newest.values()})
        shown = [one for one in newest.values() if one in news]
        if self._brief:
            shown = [one for one in shown if not self._knows(name, one)]
        return f"hears from {by} of {self._list(tuple(shown))}" if shown else None

    def _knows(self, name: PeerName, update: Update) -> bool:
        """Tell whether a site has sealed this update since its start, or heard of it before."""
        return self._shown.setdefault((name, f"own {update.digest}"), update) is not update

    def _news(self, name: PeerName, topic: str, what: object, text: str) -> str | None:
        known = (name, topic) in self._shown and self._shown[(name, topic)] == what
        self._shown[(name, topic)] = what
        return None if known else text

    def _list(self, updates: tuple[Update, ...]) -> str:
        return ", ".join(self._update(update) for update in updates) or "nothing"

    def _update(self, update: Update | None) -> str:
        """`b5`: of site-b, round 5; `b5'` for another digest of that round, `b5+1` for another
        generation."""
        if update is None:
            return "nothing"
        short = update.peer.removeprefix("site-")
        generations = [number for peer, number in self._generations if peer == update.peer]
        if update.generation not in generations:
            self._generations[(update.peer, update.generation)] = len(generations)
        number = self._generations[(update.peer, update.generation)]
        name = f"{short}{update.round}" + (f"+{number}" if number else "")
        key = (update.peer, update.digest)
        if key not in self._names:
            while name in self._names.values():
                name += "'"
            self._names[key] = name
        return self._names[key]


def transcript(
    history: Iterable[HistoryEntry],
    about: Iterable[PeerName] = (),
    last: int | None = None,
    *,
    brief: bool = False,
) -> str:
    """Return the transcript of some sites, or of all; updates are named over the whole history."""
    writer, wanted = TranscriptWriter(brief=brief), set(about)
    lines = [(entry[1], line) for entry in history if (line := writer.line(entry))]
    chosen = [line for name, line in lines if not wanted or name in wanted]
    return "\n".join(chosen[-last:] if last else chosen)
