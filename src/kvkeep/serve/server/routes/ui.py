"""The dashboard: its page at ``/`` and the page's files below ``/ui/``.

They contain no data and need no key: the page asks the user for it, and gets its data from ``/kv``.
The files are listed once; no path of a request reaches a file system.
"""

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.guards import PAGE_HEADERS

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_LICENCES = "text/plain; charset=utf-8"


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """The dashboard."""
    return _answer(request, _INDEX)


@router.api_route("/ui/{name:path}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    """A script, style, picture or licence of the dashboard."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, "the dashboard has no such file", headers=PAGE_HEADERS)
    if request.headers.get("if-none-match") == found.headers["etag"]:
        return Response(status_code=304, headers=found.headers)
    body = b"" if request.method == "HEAD" else found.content
    length = {"content-length": str(len(found.content))}
    return Response(body, headers={**found.headers, **length})


@cache
def _files() -> dict[str, _File]:
    """Return all files of the dashboard by name, 200 kB together."""
    found = {}
    ours, charts = files("kvkeep.serve.server") / "ui", files("kvkeep") / "vendor/uplot"
    for part, folder in (("", ours), ("vendor/", charts)):
        for one in folder.iterdir():
            if one.is_file():
                found[part + one.name] = _file(one.name, one.read_bytes())
    return found


def _file(name: str, content: bytes) -> _File:
    headers = {
        **PAGE_HEADERS,
        "content-type": _TYPES.get(name.rpartition(".")[2], _LICENCES),
        # Revalidated each time, with 304 if unchanged, so that an upgrade shows at once.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    }
    return _File(content, headers)
