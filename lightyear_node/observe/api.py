"""The read-only JSON of the node's page: who may ask what, and how much of it comes at once.

What is told comes from a `Source`; nothing here knows a node.  Everything that is not exactly one
of these questions is refused with a JSON error:

    /api/v1/status
    /api/v1/sites
    /api/v1/rounds?since=N&limit=M      from round N on; without `since` the newest
    /api/v1/rounds/N
    /api/v1/rounds/N/peers/NAME
    /api/v1/events?since=SEQ            those after SEQ
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.observe.http import JSON, Answer, Request, Route
from lightyear_node.records import ROUND_MAX

PREFIX = "/api/v1/"
ROUNDS_MAX = 200
"""At most so many rounds at once: with 64 sites this is about a megabyte."""
ROUNDS_USUAL = 50

Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the answers come from; called from several threads.

    A ConfigError says that what was asked for is not there, a TimeoutError that nobody answers.
    """

    status: Callable[[], Plain]
    sites: Callable[[], Sequence[Plain]]
    rounds: Callable[[], Sequence[Plain]]
    """The completed rounds that are at hand, oldest first, each with its number as `round`."""
    in_short: Callable[[Plain], Plain]
    """What a list tells of one of them."""
    round: Callable[[int], Plain]
    peer: Callable[[int, str], Plain]
    events: Callable[[], Sequence[Plain]]
    """The newest, oldest first, each with a growing `seq`."""
    run: str
    """Another one after each start: events are counted anew then."""


class _Refused(Exception):
    def __init__(self, status: int, error: str, hint: str | None = None) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


def api_route(source: Source) -> Route:
    def answer(request: Request) -> Answer | None:
        if not request.path.startswith(PREFIX):
            return None
        try:
            with _in_words():
                return answered(_asked(source, request))
        except _Refused as refused:
            return refusal(refused.status, refused.error, refused.hint)

    return answer


def answered(plain: Any) -> Answer:
    # JSON has no word for what is not finite, and a browser would refuse the whole answer.
    text = json.dumps(_finite(plain), allow_nan=False, separators=(",", ":"))
    return Answer(text.encode(), JSON)


def refusal(status: int, error: str, hint: str | None = None) -> Answer:
    return Answer(json.dumps({"error": error, "hint": hint}).encode(), JSON, status)


def _asked(source: Source, request: Request) -> Any:
    asked = request.path.removeprefix(PREFIX)
    if asked == "rounds":
        return _rounds(source, _numbers(request.query, since=ROUND_MAX, limit=ROUNDS_MAX))
    if asked == "events":
        since = _numbers(request.query, since=ROUND_MAX).get("since", 0)
        events = [event for event in source.events() if event["seq"] > since]
        return {"run": source.run, "events": events}
    _numbers(request.query)
    if asked == "status":
        return {"run": source.run, **source.status()}
    if asked == "sites":
        return {"sites": source.sites()}
    if found := re.fullmatch(r"rounds/([0-9]{1,19})", asked):
        return source.round(_number("round", found[1], ROUND_MAX))
    if found := re.fullmatch(r"rounds/([0-9]{1,19})/peers/([^/]+)", asked):
        if not re.fullmatch(NAME_PATTERN, found[2]):
            raise _Refused(400, "that is no site's name", "as in peers.yaml")
        return source.peer(_number("round", found[1], ROUND_MAX), found[2])
    raise _Refused(404, "there is nothing here", "see docs/page.md for what can be asked")


def _rounds(source: Source, asked: Mapping[str, int]) -> Any:
    known = source.rounds()
    limit = asked.get("limit", ROUNDS_USUAL)
    if limit < 1:
        raise _Refused(400, "`limit` must be at least 1")
    if "since" in asked:
        found = [entry for entry in known if entry["round"] >= asked["since"]][:limit]
    else:
        found = list(known[-limit:])
    first, last = (known[0]["round"], known[-1]["round"]) if known else (None, None)
    return {"rounds": [source.in_short(entry) for entry in found], "first": first, "last": last}


def _numbers(query: str, **greatest: int) -> dict[str, int]:
    """The query's parameters, each at most once and none but these."""
    try:
        pairs = parse_qsl(query, True, strict_parsing=True, max_num_fields=8) if query else []
    except ValueError:
        raise _Refused(400, "the query makes no sense") from None
    found: dict[str, int] = {}
    for name, value in pairs:
        if name not in greatest or name in found:
            known = ", ".join(f"`{one}`" for one in greatest) or "none"
            raise _Refused(400, "an unknown or repeated parameter", f"known: {known}")
        found[name] = _number(name, value, greatest[name])
    return found


def _number(name: str, text: str, greatest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > greatest:
        raise _Refused(400, f"`{name}` must be a whole number from 0 to {greatest}")
    return int(text)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except ConfigError as problem:
        raise _Refused(404, str(problem), problem.hint) from None
    except TimeoutError:
        hint = "see its log; `/livez` says whether it is alive"
        raise _Refused(503, "the node is too busy to answer", hint) from None
    except LightyearError:
        # Its words may name files: they are for the operator's log.
        hint = "`lightyear-node audit verify` says more"
        raise _Refused(503, "the record cannot be read", hint) from None


def _finite(plain: Any) -> Any:
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else None
    if isinstance(plain, Mapping):
        return {str(key): _finite(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    return plain
