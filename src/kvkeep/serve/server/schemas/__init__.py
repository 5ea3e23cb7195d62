"""What clients send and what they are sent, as pydantic models: the OpenAPI document is theirs.

Modules here have no ``from __future__ import annotations``: pydantic reads annotations at run time.
"""
