"""The files of the node's page, from this package and no other place."""

from __future__ import annotations

from pathlib import Path

from lightyear_node.observe.http import Answer, Request, Route

FOLDER = Path(__file__).parent / "page"
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
    """All files are read here and now: no path of a request ever meets the disk."""
    files = {
        f"/page/{path.name}": Answer(path.read_bytes(), KINDS[path.suffix], 200, HEADERS)
        for path in FOLDER.iterdir()
        if path.suffix in KINDS
    }
    files["/"] = files.pop("/page/index.html")

    def answer(request: Request) -> Answer | None:
        return files.get(request.path)

    return answer
