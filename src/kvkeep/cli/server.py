"""Options to reach a running server: its address, API key, and TLS certificates."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from kvkeep.cli.arguments import add_path, add_seconds
from kvkeep.cli.client import Address, Client, Gone
from kvkeep.core.config_file import key_in
from kvkeep.core.errors import InvalidValue, reason

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["KEY_VARIABLE", "add_server_arguments", "add_server_url", "api_key", "connect", "path"]

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
