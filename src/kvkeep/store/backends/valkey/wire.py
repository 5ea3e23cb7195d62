"""One connection to a Valkey server: sends commands, reads answers, copies no value.

Client libraries copy a value into a command, and an answer out of their own buffers: measured, a
put of 32 MiB had a quarter of a socket's speed. Here a value goes between the caller's buffer and
the socket without a copy. Time and memory are bounded, whatever an answer claims to be.
The protocol is RESP2 (https://valkey.io/topics/protocol/), which every server speaks.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Union

from kvkeep.core.errors import reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MAX_VALUE",
    "Answer",
    "Garbled",
    "Lost",
    "ServerError",
    "TimedOut",
    "Wire",
    "around_value",
    "command",
    "connect",
]

MAX_VALUE: Final = 512 * 1024 * 1024
"""Bytes; the default of a server's ``proto-max-bulk-len``."""

_BUFFER: Final = 16 * 1024
_MAX_LINE: Final = 4096
_MAX_TEXT: Final = 1 << 20  # bytes of one string in an answer that is no record
_MAX_ITEMS: Final = 1 << 20
_MAX_DEPTH: Final = 4
_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")

Answer = Union["bytes", "int", "list[Answer]", "ServerError", None]


class Lost(Exception):
    """A connection cannot be opened or used any longer."""


class TimedOut(Lost):
    """The deadline passed."""


class Garbled(Lost):
    """The server's bytes are no valid answer to the command."""


class ServerError(Exception):
    """The server answered with an error; the connection stays usable. ``code``: its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


def command(*words: bytes | int) -> bytes:
    """Encode a command."""
    return b"*%d\r\n%s" % (len(words), arguments(*words))


def arguments(*words: bytes | int) -> bytes:
    """Encode the arguments of a command."""
    parts = []
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        parts.append(b"$%d\r\n%s\r\n" % (len(text), text))
    return b"".join(parts)


def around_value(
    before: Sequence[bytes], value_bytes: int, after: Sequence[bytes | int]
) -> tuple[bytes, bytes]:
    """Encode a command without its one long argument: the bytes before and after that."""
    words = len(before) + 1 + len(after)
    return (
        b"*%d\r\n%s$%d\r\n" % (words, arguments(*before), value_bytes),
        b"\r\n" + arguments(*after),
    )


def connect(address: tuple[str, int], deadline: float, tls: ssl.SSLContext | None) -> Wire:
    """Connect to ``address``, encrypted with ``tls``. Raises `Lost`.

    The addresses of a host name are tried in turn, each with an equal share of the time left.
    """
    host, port = address
    if not 0 < port < 1 << 16:  # from a redirection; the system would wrap it
        raise Lost(f"{host}:{port} cannot be found: there is no such port")
    failure: OSError = TimeoutError()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for left in range(len(found), 0, -1):
            family, kind, protocol, _, place = found[-left]
            plain = socket.socket(family, kind, protocol)
            try:
                plain.settimeout(max(0.001, (deadline - time.monotonic()) / left))
                plain.connect(place)
                plain.settimeout(max(0.001, deadline - time.monotonic()))
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return Wire(
                    tls.wrap_socket(plain, server_hostname=host) if tls else plain, deadline
                )
            except OSError as error:
                plain.close()
                failure = error
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise Lost(f"{host} cannot be found: {reason(error)}") from error
    if isinstance(failure, TimeoutError):
        raise TimedOut("it timed out while connecting") from failure
    raise Lost(reason(failure)) from failure


class Wire:
    """A connected socket with a receive buffer.

    After `Lost` it must be closed; after `ServerError` it can be used again. One thread at a time.

    Attributes:
        deadline: on the clock of `time.monotonic`; a call that has not finished by then raises
            `TimedOut`. Set it before each use.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._socket = sock
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = 0  # _buffer[_start:_end] is received and unread
        self._end = 0

    def usable(self) -> bool:
        """Whether nothing is pending: neither the end of the stream nor bytes of an old answer."""
        if self._start != self._end:
            return False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts`` unchanged."""
        try:
            for part in parts:
                with self._waiting():
                    self._socket.sendall(part)
        except TimedOut:
            raise
        except Lost as lost:
            # A server that rejects a command answers and closes before it has read all of it.
            answer = self.answer()
            if isinstance(answer, ServerError):
                raise Lost(f"the server hung up: {answer}") from lost
            raise

    def answer(self, depth: int = 0) -> Answer:
        """Read one answer that is no record. Errors are returned: other answers may follow."""
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            return ServerError(text.decode("utf-8", "replace"))
        if kind == b":":
            return _number(text, -(1 << 63), 1 << 63)
        if kind == b"$":
            length = _number(text, -1, _MAX_TEXT)
            return None if length < 0 else self._text(length)
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _number(text, -1, _MAX_ITEMS)
            return None if count < 0 else [self.answer(depth + 1) for _ in range(count)]
        raise Garbled(f"an answer begins with {kind!r}")

    def expect(self) -> Answer:
        """Read the last answer that is due; raise it if it is an error."""
        answer = self.answer()
        if isinstance(answer, ServerError):
            raise answer
        return answer

    def expect_ok(self) -> None:
        """Read ``+OK``."""
        answer = self.expect()
        if answer != b"OK":
            raise Garbled(f"the server answered {answer!r:.60} where OK is expected")

    def value_size(self) -> int | None:
        """Read a value's size in bytes, which `fill` must read next; None: there is no value."""
        kind, text = self._line()
        if kind == b"-":
            raise ServerError(text.decode("utf-8", "replace"))
        if kind != b"$":
            raise Garbled(f"an answer begins with {kind!r} where a value is expected")
        length = _number(text, -1, MAX_VALUE)
        return None if length < 0 else length

    def fill(self, out: memoryview) -> None:
        """Fill ``out`` with the value and read its end."""
        known = min(len(out), self._end - self._start)
        out[:known] = self._buffer[self._start : self._start + known]
        self._start += known
        while known < len(out):
            known += self._receive_into(out[known:])
        if self._take(2) != b"\r\n":
            raise Garbled("a value is longer or shorter than its stated size")

    def _text(self, length: int) -> bytes:
        text = bytearray(length)
        self.fill(memoryview(text))
        return bytes(text)

    def _line(self) -> tuple[bytes, bytes]:
        """Return the next line: its first byte, which is the answer's type, and the rest."""
        while True:
            line = bytes(self._buffer[self._start : self._end])
            end = line.find(b"\r\n", 0, _MAX_LINE)
            if end > 0:
                self._start += end + 2
                return line[:1], line[1:end]
            if len(line) >= _MAX_LINE or end == 0:
                raise Garbled("the server does not speak the Valkey protocol")
            self._receive()

    def _take(self, length: int) -> bytes:
        while self._end - self._start < length:
            self._receive()
        self._start += length
        return bytes(self._buffer[self._start - length : self._start])

    def _receive(self) -> None:
        """Receive more bytes into the buffer."""
        if self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive_into(self._buffer[self._end :])

    def _receive_into(self, out: memoryview) -> int:
        with self._waiting():
            length = self._socket.recv_into(out)
        if length == 0:
            raise Lost("the server hung up")
        return length

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Limit the socket to the deadline; turn its errors into `Lost`."""
        left = self.deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            yield
        except TimeoutError as error:
            raise TimedOut("it timed out") from error
        except OSError as error:
            raise Lost(reason(error)) from error


def _number(text: bytes, low: int, high: int) -> int:
    if not _NUMBER.fullmatch(text):
        raise Garbled(f"{text!r:.60} where a number is expected")
    number = int(text)
    if not low <= number <= high:
        raise Garbled(f"{number} where a number in {low} … {high} is expected")
    return number
