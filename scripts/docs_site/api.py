"""The public names of a room: what its ``__all__`` says, errors last, read and not imported."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

__all__ = ["listed", "module_text", "public_names"]

SOURCE = Path(__file__).parents[2] / "src"


def public_names(room: str) -> str:
    """Return the package's docstring, then the markers for mkdocstrings."""
    errors = _imported(room, "kvkeep.core.errors")
    shown = (f"::: {room}.{name}" for name in sorted(listed(room), key=errors.__contains__))
    return "\n\n".join([_first_paragraph(room), *shown])


def listed(room: str) -> list[str]:
    """Return the names in the package's ``__all__`` that have a docstring of their own."""
    for node in _parsed(room).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if not name.startswith("__")]
    raise SystemExit(f"{room} has no __all__")


def module_text(module: str) -> str:
    """Return the module's docstring without its first line; indented parts stay preformatted."""
    _, *paragraphs = _docstring(module).split("\n\n")
    shown = (
        f"```text\n{textwrap.dedent(text)}\n```" if text.startswith("    ") else text
        for text in paragraphs
    )
    return "\n\n".join(shown)


def _imported(room: str, source: str) -> set[str]:
    """Return the names that the package imports from other modules."""
    return {
        alias.asname or alias.name
        for node in _parsed(room).body
        if isinstance(node, ast.ImportFrom) and node.module == source
        for alias in node.names
    }


def _first_paragraph(room: str) -> str:
    return _docstring(room).split("\n\n")[0]


def _docstring(module: str) -> str:
    return inspect.cleandoc(ast.get_docstring(_parsed(module)) or "")


def _parsed(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
