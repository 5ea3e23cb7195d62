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
    tokens,
    ui,
)

__all__ = ["ROUTERS"]

ROUTERS = (
    openai.router,
    messages.router,
    tokens.router,
    kv.router,
    see.router,
    see.prompts,
    map.router,
    operations.router,
    ui.router,
)
