"""`InstanceRoutes`: ``/kv/instances``, over which instances are listed, added and removed."""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyRefused, body_of
from kvkeep.serve.kv_events import Source

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from kvkeep.serve.router.membership import Membership

__all__ = ["InstanceRoutes"]

_MOST_BYTES: Final = 64 << 10
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip")


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to add an instance."""

    url: str
    events: str | None = None
    replay: str | None = None


_bodies = msgspec.json.Decoder(_Asked)


class InstanceRoutes:
    """``GET /kv/instances``, ``POST`` to add one, ``DELETE /kv/instances/NAME`` to remove one.

    Whoever adds an instance is sent prompts, so these need the ``key``, as a bearer token. Without
    a key only this machine is answered: the peer has a loopback address, and no proxy has forwarded
    the request. If other machines reach the router (``exposed``), nobody is answered without a key:
    what a sidecar passes on comes from a loopback address, too, and so does a page in a browser
    whose name was made to resolve to one. A body must say that it is JSON, so that no page can add
    an instance of a router on a loopback address.

    Thread safety: none; for the event loop.
    """

    def __init__(
        self, membership: Membership, key: str | None = None, *, exposed: bool = False
    ) -> None:
        self._membership = membership
        self._exposed = exposed
        self._key = None if key is None else key.encode()

    def routes(self) -> list[Route]:
        """Return the routes of an application."""
        return [
            Route("/kv/instances", self._list, methods=["GET"]),
            Route("/kv/instances", self._add, methods=["POST"]),
            Route("/kv/instances/{name:path}", self._remove, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        refused = self._refusal(request)
        return refused or JSONResponse({"instances": self._membership.reports()})

    async def _add(self, request: Request) -> Response:
        refused = self._refusal(request)
        if refused is not None:
            return refused
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return _error(415, "the body must be JSON, with Content-Type: application/json")
        try:
            await (body := body_of(request.scope)).read()
            asked = _read(body.take())
            url = asked.url.rstrip("/")
            new = self._membership.add(url, _sources(url, asked))
        except BodyRefused as why:
            return _error(why.status, str(why))
        except InvalidValue as why:
            return _error(400, str(why))
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(self._membership.report(url), 201 if new else 200)

    async def _remove(self, request: Request) -> Response:
        refused = self._refusal(request)
        if refused is not None:
            return refused
        given = request.path_params["name"].rstrip("/")
        name = given if "://" in given else f"http://{given}"
        if not self._membership.remove(name):
            return _error(404, f"no instance is {given[:200]!r}; GET /kv/instances lists all")
        return JSONResponse(self._membership.report(name), 202)

    def _refusal(self, request: Request) -> Response | None:
        if self._key is not None:
            if _has_key(request.headers, self._key):
                return None
            answer = _error(401, "the instances need the admin key: Authorization: Bearer KEY")
            answer.headers["www-authenticate"] = "Bearer"
            return answer
        if self._exposed:
            return _error(
                403,
                "other machines reach this router, so its instances need a key: start it with "
                "--admin-key-file, or with --host 127.0.0.1",
            )
        direct = not any(name in request.headers for name in _FORWARDED)
        if direct and request.client is not None and _is_loopback(request.client.host):
            return None
        return _error(
            403,
            "without --admin-key-file the instances are told to this machine only; start the "
            "router with a key to change them from elsewhere",
        )


def _read(body: bytes) -> _Asked:
    if len(body) > _MOST_BYTES:
        raise InvalidValue(f"the body has {len(body):,} bytes; at most {_MOST_BYTES:,} are read")
    try:
        return _bodies.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(
            f'the body must be {{"url": "http://HOST:PORT"}}, with "events" and "replay" if they '
            f"are not those of the options: {str(error)[:200]}"
        ) from error


def _sources(url: str, asked: _Asked) -> tuple[Source, ...] | None:
    if asked.events is None:
        if asked.replay is not None:
            raise InvalidValue('"replay" needs "events"')
        return None
    return (Source(url, asked.events, asked.replay),) if asked.events else ()


def _has_key(headers: Headers, key: bytes) -> bool:
    scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
    return hmac.compare_digest(given, key) and scheme.lower() == b"bearer"


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": status}
    return JSONResponse({"error": error}, status)
