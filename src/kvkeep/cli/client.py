"""Clients of the service, on the standard library alone.

`ask` streams one request of a service that was just started here. `Client` asks any server about
itself, again and again over one connection, and believes nothing that it says.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from kvkeep.cli.drawing import visible
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["Address", "Client", "Gone", "Heard", "ServerRefusal", "ask", "get"]

# As long as the service itself gives a request.
_PATIENCE_S = 600.0
# What a server says of itself comes at once, and is no longer than this.
_ANSWER_S = 10.0
_ANSWER_BYTES = 64 << 20
_SAID = 300  # characters of what a server says is wrong
_PORTS = {"http": 80, "https": 443}
_OUR_PORT = 8000  # where `kvkeep serve` listens unless told otherwise
_TOO_LITTLE_MEMORY = {"context_length_exceeded", "out_of_pages"}


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as its client has seen it; seconds count from before the connection was made."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    generated_tokens: int
    ttft_s: float
    seconds: float

    @property
    def answer(self) -> tuple[str, int, str]:
        """What must not depend on the time it took."""
        return self.text, self.generated_tokens, self.finish_reason

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None for an answer that had only one."""
        streamed = self.seconds - self.ttft_s
        return (self.generated_tokens - 1) / streamed if self.generated_tokens > 1 else None


def ask(url: str, path: str, body: dict[str, Any]) -> Heard:
    """Post ``body`` to ``path``, an endpoint that streams, and listen to the end.

    Raises `InvalidValue` with the service's own words for what it refuses, and `ConnectionError`
    for an answer that breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    text, finish_reason, usage = "", "", None
    ttft = None
    with closing(_connection(url)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        # Closed by itself: a connection that is not kept alive has handed its socket over.
        with connection.getresponse() as response:
            if response.status != 200:
                raise _refusal(json.load(response)["error"])
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    more = _text(choice)
                    text += more
                    finish_reason = choice["finish_reason"] or finish_reason
                    if ttft is None and (more or finish_reason):
                        ttft = time.perf_counter() - begun
    seconds = time.perf_counter() - begun
    if ttft is None or usage is None:
        raise ConnectionError("the answer has no end")
    return Heard(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        loaded_tokens=usage.get("kvkeep", {}).get("loaded_tokens", 0),
        generated_tokens=usage["completion_tokens"],
        ttft_s=ttft,
        seconds=seconds,
    )


def get(url: str, path: str) -> Any:
    """The JSON document at ``path``."""
    with closing(_connection(url)) as connection:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return json.load(response)


def _connection(url: str) -> HTTPConnection:
    address = urlsplit(url)
    assert address.hostname is not None, url
    return HTTPConnection(address.hostname, address.port, timeout=_PATIENCE_S)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, which has to come to its end."""
    for line in lines:
        field, _, data = line.partition(b":")
        if field != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _refusal(event["error"])
        yield event
    raise ConnectionError("the answer broke off")


def _text(choice: dict[str, Any]) -> str:
    """The text of an event: of a chat, or of a plain completion."""
    more: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return more


def _refusal(error: dict[str, Any]) -> Exception:
    """What the service says is wrong: with the request, or with itself."""
    message: str = error["message"]
    if error["code"] in _TOO_LITTLE_MEMORY:
        return InvalidValue(f"{message}; give it more memory")
    if error["type"] == "invalid_request_error":
        return InvalidValue(message)
    return ConnectionError(f"the service says: {message}")


# --- any server, about itself ---------------------------------------------------------------------


class Gone(ConnectionError):
    """A server is not there, is not well, or breaks off: it may be there again later."""


class ServerRefusal(InvalidValue):
    """A server has answered that it will not; ``status`` is HTTP's, ``code`` its own or None."""

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ServerRefusal], tuple[str, int, str | None]]:
        return type(self), (str(self), self.status, self.code)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, out of ``http://host:port``, ``host:port`` or ``https://host/below``."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address as people write it: without a scheme, http and port 8000 are meant.

        Raises `InvalidValue` for everything else that a URL may have, a password above all.
        """
        wrong = f"{visible(text[:_SAID])!r} is no address of a server: write http://host:port"
        with_scheme = "://" in text
        try:
            parts = urlsplit(text if with_scheme else f"http://{text}")
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise InvalidValue(f"{wrong} ({error})") from error
        if parts.username is not None or parts.password is not None:
            raise InvalidValue(
                "an address with a password in it is seen by everybody; "
                "give an API key with --api-key-file, or $KVKEEP_API_KEY"
            )
        plain = host is not None and host.isascii() and host.isprintable() and " " not in host
        if parts.scheme not in _PORTS or not plain or parts.query or parts.fragment or port == 0:
            raise InvalidValue(wrong)
        path = parts.path.rstrip("/")
        if not (path.isascii() and path.isprintable() and " " not in path):
            raise InvalidValue(wrong)
        assert host is not None
        default = _PORTS[parts.scheme] if with_scheme else _OUR_PORT
        return cls(parts.scheme, host, default if port is None else port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


class Client:
    """Asks one server for JSON, over a connection that is kept and made again where it broke.

    What a server refuses (4xx) is `ServerRefusal`, in its own words; `Gone` says that it is not
    there, is not well, or speaks something else. Everything in a message that a server has said
    can be printed. ``ca_file`` has the certificates to trust for https
    (default: the system's). Not thread-safe: one thread at a time. A request takes ``timeout_s``
    seconds without a byte at most; redirects are not followed, so the key goes nowhere else.
    """

    def __init__(
        self,
        address: Address,
        *,
        key: str | None = None,
        ca_file: Path | None = None,
        timeout_s: float = _ANSWER_S,
    ) -> None:
        self.address = address
        self._headers = {"Accept": "application/json", "User-Agent": "kvkeep"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = None
        if address.scheme == "https":
            self._tls = _trusting(ca_file)
        elif ca_file is not None:
            raise InvalidValue(f"--ca-file is for https; {address} is not")
        self._timeout_s = timeout_s
        self._connection: HTTPConnection | None = None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at ``path``, which is quoted already."""
        return self._asked("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that answers ``body``. Sent twice where an old connection breaks."""
        return self._asked("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        """Close the connection; the next question makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            if self._connection is not None:
                try:
                    return self._exchange(self._connection, method, path, body)
                except Gone:
                    raise
                except (ConnectionError, HTTPException):
                    self.close()  # a server closes what is idle; nobody knows before one asks
            self._connection = self._connect()
            return self._exchange(self._connection, method, path, body)
        except (OSError, HTTPException) as error:
            self.close()
            if isinstance(error, Gone):
                raise
            raise Gone(self._trouble(error)) from error
        except BaseException:
            self.close()  # half an answer may still be in it
            raise

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None
    ) -> dict[str, Any]:
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, self.address.path + path, body, {**self._headers, **kind})
        with connection.getresponse() as response:
            said = response.read(_ANSWER_BYTES + 1)
            if response.length and len(said) <= _ANSWER_BYTES:  # what it said would come did not
                raise IncompleteRead(said, response.length)
            if len(said) > _ANSWER_BYTES:
                raise Gone(f"{self.address} answers with more than {_ANSWER_BYTES:,} bytes")
            status = response.status
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        raise self._refusal(status, path, found)

    def _refusal(self, status: int, path: str, found: object) -> Exception:
        """What a status other than 200 means, or an answer that is no JSON object."""
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        if status == 401:
            given = "another" if "Authorization" in self._headers else "an"
            return ServerRefusal(
                f"{self.address} needs {given} API key: give it with --api-key-file FILE, or in "
                "$KVKEEP_API_KEY",
                status,
            )
        if isinstance(message, str):
            said = f"{self.address} says: {visible(message[:_SAID])}"
            if 400 <= status < 500 and status not in {408, 429}:
                return ServerRefusal(said, status, code if isinstance(code, str) else None)
            return Gone(said)
        place = f"{self.address} answers {status} at {path.partition('?')[0]}"
        if status >= 500 or status in {408, 429}:
            return Gone(place)
        return ServerRefusal(f"{place}, without what a kvkeep server says there", status)

    def _connect(self) -> HTTPConnection:
        at = self.address
        connection: HTTPConnection
        if self._tls is None:
            connection = HTTPConnection(at.host, at.port, timeout=self._timeout_s)
        else:
            connection = HTTPSConnection(
                at.host, at.port, timeout=self._timeout_s, context=self._tls
            )
        try:
            connection.connect()
        except BaseException:
            connection.close()  # it may be connected, and no TLS came of it
            raise
        return connection

    def _trouble(self, error: OSError | HTTPException) -> str:
        """Why nothing came, in words that say what to look at."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.address} is not trusted "
                f"({visible(error.verify_message)}); --ca-file FILE names one to trust"
            )
        if isinstance(error, ssl.SSLError):
            return f"{self.address} does not speak TLS as it should ({error.reason})"
        if isinstance(error, socket.gaierror):
            return f"nobody knows a host {self.address.host} (of {self.address})"
        if isinstance(error, TimeoutError):
            return f"{self.address} does not answer within {self._timeout_s:g} s"
        if isinstance(error, ConnectionRefusedError):
            return f"no server listens at {self.address}"
        if isinstance(error, ConnectionError | IncompleteRead):
            return f"{self.address} has closed the connection before its answer was whole"
        if isinstance(error, HTTPException):
            return f"what answers at {self.address} does not speak HTTP"
        return f"cannot reach {self.address}: {error.strerror or error}"


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or "it holds no certificates in PEM"
        raise InvalidValue(f"cannot read certificates from {ca_file}: {why}") from error
