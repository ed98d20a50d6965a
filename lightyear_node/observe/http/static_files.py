"""Serves the dashboard's files from this package."""

from __future__ import annotations

from pathlib import Path

from lightyear_node.observe.http.server import Request, Response, Route

FOLDER = Path(__file__).parents[1] / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
HEADERS = {"Content-Security-Policy": POLICY}


def page_route() -> Route:
    """Read all files once: no request path is ever used to open a file."""
    files = {
        f"/page/{path.name}": Response(path.read_bytes(), KINDS[path.suffix], 200, HEADERS)
        for path in FOLDER.iterdir()
        if path.suffix in KINDS
    }
    files["/"] = files.pop("/page/index.html")

    def respond(request: Request) -> Response | None:
        return files.get(request.path)

    return respond
