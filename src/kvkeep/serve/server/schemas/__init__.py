"""Request and response bodies as pydantic models, which make up the OpenAPI document.

Modules here have no ``from __future__ import annotations``: pydantic reads annotations at run time.
"""
