"""Checks of ``kvkeep doctor`` on the address at which an engine is to serve its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.doctor_results import ok, warn
from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.status_options import StatusAddress, loopback_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.cli.doctor_results import CheckResult

__all__ = ["status_results"]


def status_results(text: str, *, key: bool) -> Iterator[CheckResult]:
    """Yield whether the status can be served at ``text``, and whether strangers can read it.

    An engine goes on without a status, so nothing here fails. Binds the address for a moment.
    """
    if not text:
        return
    address = StatusAddress.parse(text)
    about = f"status {address}"
    try:
        from kvkeep.serve.http import bind  # noqa: PLC0415 - its packages are an extra

        bind(address.host, address.port).close()
    except ImportError as error:
        yield warn("access", about, f"{error}", "install that: the engine goes on without a status")
        return
    except InvalidValue as error:
        yield warn("access", about, str(error).partition(";")[0], "choose another address: the "
                   "engine goes on without a status. If the engine is running, this is its own "
                   "address")  # fmt: skip
        return
    if loopback_names(address.host) is None and not key:
        yield warn("access", about, "other machines can reach it, and no key is asked for: ids, "
                   "salts and figures of all requests are told", "give status_key_file, or "
                   "an address of this machine alone, as 127.0.0.1:8201")  # fmt: skip
        return
    yield ok("access", about, "can be served" + (", and asks for a key" if key else ""))
