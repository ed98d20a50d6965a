"""The read-only JSON API of the dashboard: routes, parameters, limits.

Data come from an `ApiSource`; nothing here knows a node.  All other requests get a JSON error:

    /api/v1/status
    /api/v1/sites
    /api/v1/rounds?since=N&limit=M      from round N on; without `since`, the newest
    /api/v1/rounds/N
    /api/v1/rounds/N/peers/NAME
    /api/v1/events?since=SEQ            events after SEQ
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.observe.http.server import JSON, Request, Response, Route
from lightyear_node.types import ROUND_MAX

PREFIX = "/api/v1/"
ROUNDS_MAX = 200
"""Most rounds in one response: about 1 MB with 64 sites."""
ROUNDS_DEFAULT = 50

Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ApiSource:
    """Functions that return the data; called from several threads.

    They raise ConfigError if the requested item does not exist, TimeoutError if the node is busy.
    """

    status: Callable[[], Plain]
    sites: Callable[[], Sequence[Plain]]
    rounds: Callable[[], Sequence[Plain]]
    """The completed rounds in memory, oldest first, each with its number as `round`."""
    in_short: Callable[[Plain], Plain]
    """Summarizes one of `rounds` for a list."""
    round: Callable[[int], Plain]
    peer: Callable[[int, str], Plain]
    events: Callable[[], Sequence[Plain]]
    """The newest events, oldest first, each with an increasing `seq`."""
    run: str
    """Changes with every start, after which events are numbered from 1 again."""


class _ApiError(Exception):
    def __init__(self, status: int, error: str, hint: str | None = None) -> None:
        super().__init__(error)
        self.status, self.hint = status, hint


def api_route(source: ApiSource) -> Route:
    def respond(request: Request) -> Response | None:
        if not request.path.startswith(PREFIX):
            return None
        try:
            return json_response(_find(source, request))
        except _ApiError as problem:
            return error_response(problem.status, str(problem), problem.hint)
        except ConfigError as problem:
            return error_response(404, str(problem), problem.hint)
        except TimeoutError:
            hint = "see its log; `/livez` shows whether it is alive"
            return error_response(503, "the node is too busy to answer", hint)
        except LightyearError:
            # Its text may contain paths, which must not leave the machine.
            hint = "run `lightyear-node audit verify`"
            return error_response(503, "the journal cannot be read", hint)

    return respond


def json_response(plain: Any) -> Response:
    # JSON has no NaN or infinity: browsers would refuse the whole response.
    text = json.dumps(_finite(plain), allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), JSON)


def error_response(status: int, error: str, hint: str | None = None) -> Response:
    return Response(json.dumps({"error": error, "hint": hint}).encode(), JSON, status)


def _find(source: ApiSource, request: Request) -> Any:
    path = request.path.removeprefix(PREFIX)
    if path == "rounds":
        return _rounds(source, _numbers(request.query, since=ROUND_MAX, limit=ROUNDS_MAX))
    if path == "events":
        since = _numbers(request.query, since=ROUND_MAX).get("since", 0)
        events = [event for event in source.events() if event["seq"] > since]
        return {"run": source.run, "events": events}
    _numbers(request.query)
    if path == "status":
        return {"run": source.run, **source.status()}
    if path == "sites":
        return {"sites": source.sites()}
    if found := re.fullmatch(r"rounds/([0-9]{1,19})", path):
        return source.round(_number("round", found[1], ROUND_MAX))
    if found := re.fullmatch(r"rounds/([0-9]{1,19})/peers/([^/]+)", path):
        if not re.fullmatch(NAME_PATTERN, found[2]):
            raise _ApiError(400, "not a valid site name", "use a name of peers.yaml")
        return source.peer(_number("round", found[1], ROUND_MAX), found[2])
    raise _ApiError(404, "no such path", "docs/page.md lists the API")


def _rounds(source: ApiSource, parameters: Mapping[str, int]) -> Any:
    known = source.rounds()
    limit = parameters.get("limit", ROUNDS_DEFAULT)
    if limit < 1:
        raise _ApiError(400, "`limit` must be at least 1")
    if "since" in parameters:
        found = [entry for entry in known if entry["round"] >= parameters["since"]][:limit]
    else:
        found = list(known[-limit:])
    first, last = (known[0]["round"], known[-1]["round"]) if known else (None, None)
    return {"rounds": [source.in_short(entry) for entry in found], "first": first, "last": last}


def _numbers(query: str, **maxima: int) -> dict[str, int]:
    """Parse the query: only these parameters, each at most once."""
    try:
        pairs = parse_qsl(query, True, strict_parsing=True, max_num_fields=8) if query else []
    except ValueError:
        raise _ApiError(400, "malformed query") from None
    found: dict[str, int] = {}
    for name, value in pairs:
        if name not in maxima or name in found:
            known = ", ".join(f"`{one}`" for one in maxima) or "none"
            raise _ApiError(400, "unknown or repeated parameter", f"known: {known}")
        found[name] = _number(name, value, maxima[name])
    return found


def _number(name: str, text: str, maximum: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > maximum:
        raise _ApiError(400, f"`{name}` must be a whole number from 0 to {maximum}")
    return int(text)


def _finite(plain: Any) -> Any:
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else None
    if isinstance(plain, Mapping):
        return {str(key): _finite(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    return plain
