"""`unless_disconnected`: cancels work whose client leaves before the work is done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

__all__ = ["unless_disconnected"]

Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``. Cancel it and raise `ClientDisconnect` if the client leaves.

    The body must have been read: from then on ``receive`` only reports the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
