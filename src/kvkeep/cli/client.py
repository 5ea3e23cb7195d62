"""`Client`: JSON from a running kvkeep server, and the options to reach it.

No field of a reply is trusted: a number that is missing or invalid counts as 0, a missing text is
empty, and every text is made safe for a terminal (see `visible`).
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlencode, urlsplit

from kvkeep.cli.arguments import add_path, add_seconds
from kvkeep.cli.drawing import visible
from kvkeep.core.errors import InvalidValue, key_in, reason

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "KEY_VARIABLE",
    "Address",
    "Client",
    "Gone",
    "ServerRefusal",
    "add_server_arguments",
    "add_server_url",
    "api_key",
    "below",
    "cause_words",
    "connect",
    "entries",
    "number",
    "path",
    "short_id",
    "text",
    "tokens_by",
    "whole",
]

_LARGEST: Final = 1 << 62  # larger than any real counter
_SHARE: Final = re.compile(r"(?:less than )?\d+ % of all (?:re)?computed tokens: ")


def below(of: Any, name: str) -> Mapping[str, Any]:
    """Return the object at ``name``; an empty one if there is none."""
    found = of.get(name) if isinstance(of, dict) else None
    return found if isinstance(found, dict) else {}


def entries(of: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects in the list at ``name``; other values in it are left out."""
    found = of.get(name) if isinstance(of, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def number(of: Any, name: str) -> float | None:
    """Return the number at ``name``; None if it is missing, negative, infinite or too large."""
    found = of.get(name) if isinstance(of, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return found if 0 <= found <= _LARGEST and math.isfinite(found) else None


def whole(of: Any, name: str) -> int:
    """Return the number at ``name`` as a count; 0 if there is none."""
    return int(number(of, name) or 0)


def text(of: Any, name: str, default: str = "") -> str:
    """Return the text at ``name``, made safe for a terminal."""
    found = of.get(name) if isinstance(of, dict) else None
    return visible(found) if isinstance(found, str) else default


def tokens_by(of: Any, name: str) -> dict[str, int]:
    """Return the token counts at ``name`` by their keys, largest first; keys are made safe."""
    found = below(of, name)
    counts = {visible(key): whole(found, key) for key in found}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def short_id(name: str) -> str:
    """Shorten a request id to a prefix that identifies it, without ``cmpl-`` or ``chatcmpl-``."""
    bare = name.removeprefix("chat").removeprefix("cmpl-")
    return bare[:8] if bare != name else name


def cause_words(cause: Any) -> str:
    """Return the sentence of a cause in a summary, without the share it begins with."""
    sentence = text(cause, "sentence") or text(cause, "reason", "?").replace("_", " ")
    return _SHARE.sub("", sentence)


_TIMEOUT_S = 10.0
_ANSWER_BYTES = 64 << 20
_SHOWN = 300  # characters of a server's message
_PORTS = {"http": 80, "https": 443}
_KVKEEP_PORT = 8000  # the default of `kvkeep serve`


class Gone(ConnectionError):
    """A server cannot be reached, fails, or breaks off its answer; trying again may help."""


class ServerRefusal(InvalidValue):
    """A server refuses a request: the HTTP ``status``, and the server's error ``code`` or None."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ServerRefusal], tuple[str, int, str | None]]:
        return type(self), (str(self), self.status, self.code)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server: ``http://host:port``, ``host:port`` or ``https://host/path``."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; without a scheme, http and by default port 8000 are used.

        Raises `InvalidValue` for a URL with a password, a query or a fragment.
        """
        wrong = f"{visible(text[:_SHOWN])!r} is no address of a server: write http://host:port"
        with_scheme = "://" in text
        try:
            parts = urlsplit(text if with_scheme else f"http://{text}")
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise InvalidValue(f"{wrong} ({error})") from error
        if parts.username is not None or parts.password is not None:
            raise InvalidValue(
                "a password in an address is visible to other users; "
                "give an API key with --api-key-file or $KVKEEP_API_KEY"
            )
        plain = host is not None and host.isascii() and host.isprintable() and " " not in host
        if parts.scheme not in _PORTS or not plain or parts.query or parts.fragment or port == 0:
            raise InvalidValue(wrong)
        path = parts.path.rstrip("/")
        if not (path.isascii() and path.isprintable() and " " not in path):
            raise InvalidValue(wrong)
        assert host is not None
        default = _PORTS[parts.scheme] if with_scheme else _KVKEEP_PORT
        return cls(parts.scheme, host, default if port is None else port, path)

    def connection(self, timeout_s: float, tls: ssl.SSLContext | None = None) -> HTTPConnection:
        """Return a connection to it, not yet made; ``tls`` is for https (default: the system's)."""
        if self.scheme == "http":
            return HTTPConnection(self.host, self.port, timeout=timeout_s)
        return HTTPSConnection(self.host, self.port, timeout=timeout_s, context=tls)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


class Client:
    """Gets JSON from one server, over a connection that is kept and remade when it breaks.

    Raises `ServerRefusal` for a request that the server refuses (4xx), with the server's message,
    and `Gone` for a server that cannot be reached, fails or does not speak HTTP. Messages are safe
    to print. ``ca_file`` holds the certificates to trust for https (default: the system's);
    ``timeout_s`` is the longest wait for more bytes. Redirects are not followed, so the API key
    reaches no other server. Not thread-safe.
    """

    def __init__(
        self,
        address: Address,
        *,
        key: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.address = address
        self._headers = {"Accept": "application/json", "User-Agent": "kvkeep"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            self._tls = _trusting(ca_file)
        elif ca_file is not None:
            raise InvalidValue(f"--ca-file needs an https address; {address} is not one")
        self._timeout_s = timeout_s
        self._connection: HTTPConnection | None = None

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at ``path``, which is already quoted."""
        return self._request("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post ``body`` and return the reply; sent again if a kept connection breaks."""
        return self._request("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            if self._connection is not None:
                try:
                    return self._exchange(self._connection, method, path, body)
                except Gone:
                    raise
                except (ConnectionError, HTTPException):
                    self.close()  # the server has closed an idle connection: seen only on use
            self._connection = self._connect()
            return self._exchange(self._connection, method, path, body)
        except (OSError, HTTPException) as error:
            self.close()
            if isinstance(error, Gone):
                raise
            raise Gone(self._trouble(error)) from error
        except BaseException:
            self.close()  # part of a reply may be left in it
            raise

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None
    ) -> dict[str, Any]:
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, self.address.path + path, body, {**self._headers, **kind})
        with connection.getresponse() as response:
            reply = response.read(_ANSWER_BYTES + 1)
            if response.length and len(reply) <= _ANSWER_BYTES:  # shorter than Content-Length
                raise IncompleteRead(reply, response.length)
            if len(reply) > _ANSWER_BYTES:
                raise Gone(f"{self.address} answers with more than {_ANSWER_BYTES:,} bytes")
            status = response.status
        try:
            found = json.loads(reply)
        except (ValueError, RecursionError):
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        raise self._refusal(status, path, found)

    def _refusal(self, status: int, path: str, found: object) -> Exception:
        """Return the exception for a status other than 200, or a reply that is no JSON object."""
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        if status == 401:
            needed = "another" if "Authorization" in self._headers else "an"
            return ServerRefusal(
                f"{self.address} needs {needed} API key: give it with --api-key-file FILE or in "
                "$KVKEEP_API_KEY",
                status,
            )
        if isinstance(message, str):
            said = f"{self.address} says: {visible(message[:_SHOWN])}"
            if 400 <= status < 500 and status not in {408, 429}:
                return ServerRefusal(said, status, code if isinstance(code, str) else None)
            return Gone(said)
        place = f"{self.address} answers {status} at {path.partition('?')[0]}"
        if status >= 500 or status in {408, 429}:
            return Gone(place)
        return ServerRefusal(f"{place}: it is no kvkeep server", status)

    def _connect(self) -> HTTPConnection:
        connection = self.address.connection(self._timeout_s, self._tls)
        try:
            connection.connect()
        except BaseException:
            connection.close()  # it may be connected although TLS failed
            raise
        return connection

    def _trouble(self, error: OSError | HTTPException) -> str:
        """Return why there is no reply, and what to check."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.address} is not trusted "
                f"({visible(error.verify_message)}); --ca-file FILE names one to trust"
            )
        if isinstance(error, ssl.SSLError):
            return f"{self.address} does not speak TLS as it should ({error.reason})"
        if isinstance(error, socket.gaierror):
            return f"there is no host {self.address.host} (of {self.address})"
        if isinstance(error, TimeoutError):
            return f"{self.address} does not answer within {self._timeout_s:g} s"
        if isinstance(error, ConnectionRefusedError):
            return f"no server listens at {self.address}"
        if isinstance(error, ConnectionError | IncompleteRead):
            return f"{self.address} closed the connection before its answer was complete"
        if isinstance(error, HTTPException):
            return f"what answers at {self.address} does not speak HTTP"
        return f"cannot reach {self.address}: {error.strerror or error}"


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or "it holds no certificates in PEM"
        raise InvalidValue(f"cannot read certificates from {ca_file}: {why}") from error


KEY_VARIABLE: Final = "KVKEEP_API_KEY"
_MOST_BYTES: Final = 8192


def add_server_url(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument URL."""
    parser.add_argument("url", metavar="URL", help="address of the server: http://host:port, or "
                        "host:port")  # fmt: skip


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the connection to a server; `connect` reads them."""
    server = parser.add_argument_group("the server")
    add_path(
        server,
        "--api-key-file",
        f"file that holds the server's API key (default: ${KEY_VARIABLE}, if it is set)",
    )
    add_path(
        server, "--ca-file", "PEM file of certificates to trust, for https (default: the system's)"
    )
    add_seconds(server, "--timeout", 10.0, "time to wait for the server to send anything")


@contextmanager
def connect(url: str, args: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server at ``url``, for the options of `add_server_arguments`.

    Raises `InvalidValue` for wrong options, and instead of `Gone` for a server that cannot be
    reached or fails.
    """
    if not 0 < args.timeout <= 3600:
        raise InvalidValue(
            f"--timeout is {args.timeout:g}; seconds above 0 and up to 3600 are needed"
        )
    client = Client(
        Address.parse(url),
        key=api_key(args.api_key_file),
        ca_file=args.ca_file,
        timeout_s=args.timeout,
    )
    with client:
        try:
            yield client
        except Gone as error:
            raise InvalidValue(str(error)) from error


def api_key(file: Path | None, given: str | None = None) -> str | None:
    """Return the API key that is ``given``, that in ``file``, or that in the environment.

    None if there is none of them. Raises `InvalidValue` for one that holds no key, such as an empty
    text, for both an option and a file, and for a file that cannot be read.
    """
    if given is not None:
        if file is not None:
            raise InvalidValue("--api-key and --api-key-file both give the key; leave one out")
        return key_in("--api-key", given)
    if file is None:
        text = os.environ.get(KEY_VARIABLE)
        return None if text is None else key_in(f"${KEY_VARIABLE}", text)
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read an API key from {file}: {reason(error)}") from error
    return key_in(str(file), text)


def path(*parts: str, **query: str | int | None) -> str:
    """Join ``parts`` to a path and add the query; fields that are None are left out."""
    fields = urlencode({name: value for name, value in query.items() if value is not None})
    return "/".join(parts) + (f"?{fields}" if fields else "")
