"""A public method has a docstring, or overrides one that has: an override repeats no contract."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "kvkeep"


def _classes() -> dict[str, list[ast.ClassDef]]:
    classes: dict[str, list[ast.ClassDef]] = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return classes


CLASSES = _classes()


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any(
            ast.unparse(mark).endswith((".setter", "overload")) for mark in one.decorator_list
        )
    }


def _documented_above(node: ast.ClassDef, method: str, seen: frozenset[str] = frozenset()) -> bool:
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in seen:
            continue
        for parent in CLASSES.get(name, []):
            found = _methods(parent).get(method)
            if found is not None and ast.get_docstring(found):
                return True
            if _documented_above(parent, method, seen | {name}):
                return True
    return False


def test_every_public_method_is_documented_once_at_least() -> None:
    missing = [
        f"{node.name}.{name}"
        for nodes in CLASSES.values()
        for node in nodes
        if not node.name.startswith("_")
        for name, method in _methods(node).items()
        if not name.startswith("_")
        and ast.unparse(method.body[0]) != "..."  # a protocol that names what its caller has
        and not ast.get_docstring(method)
        and not _documented_above(node, name)
    ]
    assert missing == []
