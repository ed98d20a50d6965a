"""One page for all sites of a local federation: theirs, with a switch between them and a matrix.

The page is the node's own; each site's answers are fetched from its own port, so that what is shown
is what the site itself would show.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lightyear_node.lab.federation import LOOPBACK, SiteHome
from lightyear_node.lab.view import in_short
from lightyear_node.observe.api import answered, refusal
from lightyear_node.observe.http import JSON, Answer, HttpServer, Request, Route
from lightyear_node.observe.static import page_route
from lightyear_node.records import PeerName

ANSWER_S = 4.0
ANSWER_BYTES_MAX = 8 << 20


@contextmanager
def serving(homes: Sequence[SiteHome], malfunctions: Mapping[PeerName, str]) -> Iterator[str]:
    """Gives the page's address, on a port that was free."""
    routes = [_sites_route(homes, malfunctions), _forwarding_route(homes), page_route()]
    server = HttpServer(f"{LOOPBACK}:0", routes)
    try:
        yield f"http://{LOOPBACK}:{server.port}/"
    finally:
        server.close()


def _sites_route(homes: Sequence[SiteHome], malfunctions: Mapping[PeerName, str]) -> Route:
    sites = [
        {
            "name": home.name,
            "api": f"sites/{home.name}/api/v1",
            "about": f"sends {in_short(malfunctions[home.name])}"
            if home.name in malfunctions
            else None,
        }
        for home in homes
    ]

    def answer(request: Request) -> Answer | None:
        return answered({"sites": sites}) if request.path == "/api/v1/sites" else None

    return answer


def _forwarding_route(homes: Sequence[SiteHome]) -> Route:
    addresses = {str(home.name): home.http_address for home in homes}

    def answer(request: Request) -> Answer | None:
        asked = re.fullmatch(r"/sites/([a-z0-9-]+)(/api/v1/[a-z0-9/-]+)", request.path)
        if asked is None:
            return None
        name, path = asked.groups()
        if name not in addresses:
            return refusal(404, "there is no such site in this federation")
        if not re.fullmatch(r"[a-z0-9=&]*", request.query):
            return refusal(400, "the query makes no sense")
        try:
            return _fetched(addresses[name], f"{path}?{request.query}".removesuffix("?"))
        except (OSError, http.client.HTTPException):
            return refusal(502, f"{name} does not answer", "it is starting, or has ended")

    return answer


def _fetched(address: str, path: str) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(ANSWER_BYTES_MAX)
        return Answer(body, JSON, response.status)
    finally:
        connection.close()
