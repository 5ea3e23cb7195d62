"""`Documents`: JSON objects with nested lists of requests, read piece by piece.

    {"id": …, "requests": [{"t": 0, …}, {"type": "subagent", "requests": [{…}, …]}, …]}

A session of an agent can be a JSON object of hundreds of megabytes. It is split at the elements of
its ``requests``, and of theirs, so that only one request at a time becomes Python objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.bench.traces.fields import json_object
from kvkeep.bench.traces.files import LINE_BYTES, BadLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Documents"]

_MOST_NESTED = 16  # requests within requests
# A string, or a bracket; a quotation mark alone begins a string that is not complete.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*(.?)", re.DOTALL)
_SPACE = b" \t\r\n"
_KEY = b'"requests"'


@dataclass(slots=True)
class _Open:
    """An object whose end is not read yet: its own text, and the results for its requests."""

    text: bytearray
    size: int = 0
    inner: int = 0  # brackets open in its text
    keyed: bool = False  # the last string is the key of its requests
    requests: list[Any] | None = None

    def add(self, text: bytes) -> None:
        self.size += len(text)
        if self.size <= LINE_BYTES:
            self.text += text
        else:
            self.text.clear()


class Documents:
    """Splits bytes into documents. Not thread-safe.

    ``made`` is called for each object, inner ones first, with its fields, the results for its
    requests (None if it has no list of requests), and the number of objects around it. An element
    for which it raises `BadLine`, or that is no object, is left out, and the reason is yielded.
    Memory: the results of a document, and the text of one object without its requests, at most
    `LINE_BYTES`.
    """

    def __init__(self, made: Callable[[dict[str, Any], list[Any] | None, int], object]) -> None:
        self._made = made
        self._stack: list[_Open] = []  # objects; of all but the last, the requests are being read
        self._in_list = True  # between elements, not in an object
        self._done: list[object] = []
        self._rest = b""
        self._read = 0

    def read(self, pieces: Iterable[bytes | BadLine]) -> Iterator[object]:
        """Yield the result of each document, and before it a `BadLine` for each bad element."""
        for piece in pieces:
            if isinstance(piece, BadLine):
                yield piece
                return
            try:
                self._process(self._rest + piece)
            except BadLine as error:
                yield from self._done
                yield error
                return
            yield from self._done
            self._done.clear()
        if self._stack or self._rest.strip(_SPACE):
            yield BadLine("the file ends within an object")

    def head(self) -> dict[str, Any] | None:
        """Return the fields before the requests of the document that is being read.

        None if its requests have not begun. Raises `BadLine`.
        """
        if not self._stack or self._stack[0].requests is None:
            return None
        return json_object(bytes(self._stack[0].text) + b"}")

    def _process(self, data: bytes) -> None:
        at = 0
        while (match := _TOKEN.search(data, at)) is not None:
            token, between = match[0], data[at : match.start()]
            follows = _NEXT.match(data, match.end()) if token == _KEY else None
            if token == b'"' or (follows is not None and not follows[1]):
                # The string, or what follows it, is not complete. A string longer than a line is
                # refused here, an object of that length when it ends.
                if len(data) - at > LINE_BYTES:
                    raise BadLine(f"a string has more than {LINE_BYTES >> 20} MiB")
                self._rest = data[at:]
                return
            at = match.end()
            if self._in_list:
                self._element(token, between)
            else:
                self._member(token, between, follows is not None and follows[1] == b":")
        rest = data[at:]
        if not self._in_list:
            self._stack[-1].add(rest)
        else:
            self._check_between(rest)
        self._rest = b""

    # --- between the elements of a list, or between documents ----------------------------------

    def _element(self, token: bytes, between: bytes) -> None:
        self._check_between(between)
        if token == b"{" or (token == b"[" and self._stack):
            self._stack.append(_Open(bytearray(token), 1))
            self._in_list = False
        elif token == b"]":
            if self._stack:
                self._in_list = False  # the object goes on after its requests
        elif token == b"}":
            raise BadLine("} without {")
        elif token != b"[":  # documents may form a list
            self._bad("an object is needed, got a string")

    def _check_between(self, text: bytes) -> None:
        if text := text.strip(_SPACE + b",\xef\xbb\xbf"):
            self._bad(f"an object is needed, got {text[:40]!r}")

    def _bad(self, reason: str) -> None:
        self._done.append(BadLine(f"object {self._read}: {reason}"))

    # --- within an object ----------------------------------------------------------------------

    def _member(self, token: bytes, between: bytes, is_key: bool) -> None:
        one = self._stack[-1]
        begins = one.keyed and not between.strip(_SPACE + b":")
        one.keyed = False
        one.add(between)
        if token[:1] == b'"':
            one.keyed = is_key and not one.inner
        elif token == b"[" and begins and len(self._stack) <= _MOST_NESTED:
            one.add(b"[]")
            one.requests = [] if one.requests is None else one.requests
            self._in_list = True
            return
        elif token in b"[{":
            one.inner += 1
        elif one.inner:
            one.inner -= 1
        else:
            one.add(token)
            self._end(one)
            return
        one.add(token)

    def _end(self, one: _Open) -> None:
        self._stack.pop()
        self._in_list = True
        self._read += 1
        try:
            if one.size > LINE_BYTES:
                raise BadLine(f"a request has more than {LINE_BYTES >> 20} MiB")
            found = json_object(bytes(one.text))
            if one.requests is None and type(found.get("requests")) is list:
                raise BadLine("nested too deeply")
            made = self._made(found, one.requests, len(self._stack))
        except BadLine as error:
            self._bad(str(error))
        except RecursionError:
            self._bad("nested too deeply")
        else:
            around = self._stack[-1].requests if self._stack else self._done
            assert around is not None, "an element of no list"
            around.append(made)
