"""The HTTP API as Markdown, from the document that the server itself gives out."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from fastapi import FastAPI

__all__ = ["document", "endpoints"]


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document of all endpoints, without loading a model."""
    from kvkeep.serve.server.routes import ROUTERS  # noqa: PLC0415 - torch comes with it: seconds

    app = FastAPI(title="kvkeep")
    for router in ROUTERS:
        app.include_router(router)
    return app.openapi()


def endpoints() -> str:
    """Return a section for each endpoint, and one for each object of requests and answers."""
    found = document()
    parts = ["## Endpoints"]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            parts.append(_endpoint(method, path, operation))
    schemas = found["components"]["schemas"]
    parts += ["## Objects", *(_object(name, schemas[name]) for name in sorted(schemas))]
    return "\n\n".join(part for part in parts if part)


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"### {method.upper()} {_text(path)}", _text(operation.get("description", ""))]
    rows = [
        _row(field["name"], field["schema"], f"{field['in']}. {field.get('description', '')}")
        for field in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        rows.append(f"| body | {_type(content.get('schema', {}))} | `{kind}` |")
    if rows:
        parts.append("\n".join(["| takes | type | what it is |", "|---|---|---|", *rows]))
    answers = [_answer(status, answer) for status, answer in operation["responses"].items()]
    parts.append("\n".join(["| answers | type | when |", "|---|---|---|", *answers]))
    return "\n\n".join(part for part in parts if part)


def _answer(status: str, answer: dict[str, Any]) -> str:
    status = "else" if status == "default" else status
    types = {_type(content.get("schema", {})) for content in answer.get("content", {}).values()}
    shown = ", ".join(sorted(types - {""}))
    return f"| {status} | {shown} | {_text(answer.get('description', ''))} |"


def _object(name: str, schema: dict[str, Any]) -> str:
    parts = [f"### {name}", _text(schema.get("description", ""))]
    required = schema.get("required", [])
    rows = [
        _row(field, of, ("" if field in required else "optional. ") + of.get("description", ""))
        for field, of in schema.get("properties", {}).items()
    ]
    if rows:
        parts.append("\n".join(["| field | type | what it is |", "|---|---|---|", *rows]))
    elif "enum" in schema:
        parts.append(f"One of {', '.join(f'`{value}`' for value in schema['enum'])}.")
    return "\n\n".join(part for part in parts if part)


def _row(name: str, schema: dict[str, Any], text: str) -> str:
    limits = [
        f"{word} {schema[key]:g}"
        for key, word in (("minimum", "from"), ("maximum", "to"))
        if isinstance(schema.get(key), int | float)
    ]
    if schema.get("default") is not None:
        limits.append(f"default: {schema['default']}")
    said = " ".join(part for part in (text.strip(), *limits) if part)
    return f"| `{name}` | {_type(schema)} | {_text(said)} |"


def _type(schema: dict[str, Any]) -> str:
    """Return the type in words, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    for together in ("anyOf", "oneOf", "allOf"):
        if together in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[together]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties']) or 'anything'}"
    return str(kind)


def _text(text: str) -> str:
    """Escape text for a table or a heading."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"([\\*_<>|\[\]{}#])", lambda found: f"&#{ord(found[1])};", text)
