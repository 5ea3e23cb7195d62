"""The endpoints by purpose; each module has a ``router``.

Modules here have no ``from __future__ import annotations``: FastAPI reads annotations at run time.
"""

from kvkeep.serve.server.routes import (
    kv,
    map,
    messages,
    openai,
    operations,
    see,
    ui,
)

__all__ = ["ROUTERS"]

ROUTERS = (
    openai.router,
    messages.router,
    openai.tokenizing,
    kv.router,
    see.router,
    map.router,
    operations.router,
    ui.router,
)
