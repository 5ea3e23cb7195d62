"""Ports for what a test starts later, or for what is never there.

A port that the system chooses for a socket may, once that is closed, be the next one that it gives
to a connection or a server of another test. These lie below those that it gives out, and while the
process lives no other process that asks here gets the same.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile

_PORTS = range(20_000, 32_000)  # Linux gives out 32768 and above, BSD and macOS 49152 and above

_left = random.sample(_PORTS, len(_PORTS))
_locks = os.open(
    os.path.join(tempfile.gettempdir(), f"kvkeep-test-ports-{os.getuid()}"),
    os.O_RDWR | os.O_CREAT, 0o600,
)  # fmt: skip


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that nobody else gets here."""
    while True:
        assert _left, f"all of {_PORTS} are taken"
        port = _left.pop()
        try:
            fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)  # the byte of this port
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
