"""`Via`: marks the requests that a router passes on, so that none comes back to it for ever."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    Headers = Iterable[tuple[bytes, bytes]]

__all__ = ["Via"]


class Via:
    """The header ``Via`` (RFC 9110, 7.6.3) with a random name of this router.

    A router can be among its own instances, if its name is discovered or two routers list each
    other. The name is random and told to instances only, so no client can forge a loop.
    """

    def __init__(self) -> None:
        self._name = b"kvkeep-%s" % secrets.token_hex(8).encode()

    def passed(self, headers: Headers) -> bool:
        """Whether a request with these headers has been at this router before."""
        return any(
            self._name in re.split(rb"[,\s]+", value) for name, value in headers if name == b"via"
        )

    def mark(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers with which a request is passed on."""
        return [*headers, (b"via", b"1.1 %s" % self._name)]
