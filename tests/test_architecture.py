"""The direction between the rooms, read from the imports of every module in ``src/kvkeep``."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = Path(__file__).parents[1] / "src"

# What every room may use; among themselves they are in order, and use no room.
BASE = {"errors", "tokens", "extras", "geometry", "keys", "events"}

# Which rooms a room may use, besides the base. Rooms that are still to be built stand here already:
# their place is decided. "" is `kvkeep/__init__.py`, the public names.
ROOMS: dict[str, set[str]] = {
    "": {"cache", "pages", "slots"},
    "pages": set(),  # does not know that prefixes exist
    "slots": set(),  # contiguous caches: nothing of theirs is a page
    "eviction": set(),
    "whatif": set(),  # sees keys, tokens and page ids of prompts, not the cache
    "prefix": {"eviction"},  # its nodes are what a policy orders
    "cache": {"pages", "prefix", "eviction", "whatif"},
    "codecs": set(),
    "backends": set(),  # see keys and bytes, no tokens and no tensors
    "tiers": {"backends", "eviction", "codecs"},
    "store": {"tiers", "codecs", "backends"},
    "models": set(),
    "engine": {"cache", "store", "pages", "models"},
    "integrations": {
        "cache",
        "prefix",
        "eviction",
        "store",
        "pages",
        "tiers",
        "backends",
        "traces",  # to capture one
    },
    "server": {
        "engine",
        "cache",
        "traces",  # to capture one
        "prefix",  # to draw it
        "explain",  # why prompts missed
        "telemetry",
    },
    "explain": set(),  # sees events, tokens and what stores say; neither cache nor engine
    "feed": set(),  # KV events on the wire; of a cache it knows the hook
    "router": {"feed"},
    "traces": set(),  # requests with their times; what replays them is another room
    "replay": {"cache", "eviction", "tiers", "traces"},
    "telemetry": set(),
    "testing": {"cache", "prefix", "eviction", "pages", "tiers", "backends", "codecs", "store"},
    "cli": {
        "cache",
        "prefix",
        "eviction",
        "engine",
        "models",
        "server",
        "feed",
        "router",
        "replay",
        "traces",
        "store",
        "tiers",
        "backends",
        "codecs",
        "telemetry",
    },
}
# Under TYPE_CHECKING alone: the names of types, where a room handles what is another's.
TYPES_ONLY = {
    "prefix": {"pages"},  # `PageArray`, the type of a row of page ids
    "server": {"store", "tiers"},  # what the store of its engine tells
}
# Rooms that may not even use all of the base.
BASE_OF = {"telemetry": {"events", "errors"}, "backends": {"errors", "keys", "events", "geometry"}}

# Who may import what is not ours and not the standard library: a room, or one module of it.
EXTERNAL: dict[str, set[str]] = {
    "numpy": {""},  # everybody
    "torch": {
        "pages.tensors", "pages.prepared", "slots.tensors",
        "engine", "integrations", "store", "codecs",
    },
    "vllm": {"integrations.vllm"},
    "sglang": {"integrations.sglang"},
    # where the models of engines lie
    "huggingface_hub": {"integrations.vllm.naming", "integrations.sglang.naming"},
    "transformers": {
        "engine", "integrations",
        "cli.model",  # to quieten its progress bars
    },
    "flash_attn": {"engine.flash"},  # if it is installed
    "flash_attn_interface": {"engine.flash"},
    "safetensors": {"engine"},
    "xxhash": {"tiers"},
    "numcodecs": {"codecs"},
    "cryptography": {"codecs"},
    "obstore": {"backends.objects"},
    "zstandard": {"traces.files"},
    "jinja2": {"engine"},
    "matplotlib": {"replay.report.picture"},
    "opentelemetry": {"telemetry"},
    "fastapi": {"server"}, "starlette": {"server", "router", "cli.route"},
    "uvicorn": {"server", "router", "cli.route"},
    "pydantic": {"server"}, "pydantic_core": {"server"},
    "prometheus_client": {"server", "router", "cli.route"},
    # The command says which extra is missing before anything is begun.
    "zmq": {"feed", "cli.route"}, "msgspec": {"feed"},
    "httpx": {"router", "cli.route"},
    "rich": {"cli", "prefix.render", "server.tree"},
    "pytest": {"testing"},
    "hypothesis": {"testing"},
}  # fmt: skip

# Who imports what a variable names, which cannot be read here: `require`; the demo, whose prompts
# are documentation of the standard library; the suites, each imported when it is asked for.
COMPUTED = {"kvkeep.errors", "kvkeep.cli.demo", "kvkeep.testing"}

Sources = dict[str, str]
"""Module name → its source text."""


@dataclass(frozen=True)
class Import:
    """One import, and when it happens: with the module, later in a function, or for types only."""

    importer: str
    target: str
    line: int
    when: Literal["run", "late", "types"]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules() -> Sources:
    """Every module of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


class Reader(ast.NodeVisitor):
    """Collects the imports of one module."""

    def __init__(self, module: str, sources: Sources) -> None:
        self.module = module
        self.sources = sources
        self.when: Literal["run", "late", "types"] = "run"
        self.imports: list[Import] = []
        self.computed: list[int] = []

    def add(self, target: str, line: int) -> None:
        self.imports.append(Import(self.module, target, line, self.when))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            is_package = any(name.startswith(self.module + ".") for name in self.sources)
            parts = self.module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, base] if base else parts)
        for alias in node.names:
            module = f"{base}.{alias.name}"
            self.add(module if module in self.sources else base, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in {"require", "import_module", "__import__"} and node.args:
            start = node.args[0]
            if isinstance(start, ast.JoinedStr):  # f"kvkeep.cli.{name}" names the room, at least
                start = start.values[0]
            if isinstance(start, ast.Constant) and isinstance(start.value, str):
                self.add(start.value.rstrip("."), node.lineno)
            else:
                self.computed.append(node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self.generic_visit(node)
            return
        before, self.when = self.when, "types"
        for statement in node.body:
            self.visit(statement)
        self.when = before
        for statement in node.orelse:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before = self.when
        self.when = "late" if before == "run" else before
        self.generic_visit(node)
        self.when = before

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef


def read(sources: Sources) -> dict[str, Reader]:
    readers = {}
    for module, source in sources.items():
        readers[module] = Reader(module, sources)
        readers[module].visit(ast.parse(source))
    return readers


def room_of(module: str) -> str:
    """The room of one of our modules: "" for the package itself; running it is the cli's."""
    room = module.partition(".")[2].partition(".")[0]
    return "cli" if room == "__main__" else room


def within(module: str, places: set[str]) -> bool:
    inner = module.partition(".")[2]
    return any(place in {"", inner} or inner.startswith(place + ".") for place in places)


# --- the rules -------------------------------------------------------------------------------


def wrong_direction(sources: Sources) -> Iterator[str]:
    for module, reader in read(sources).items():
        room = room_of(module)
        if room not in ROOMS and room not in BASE:
            yield f"{module}: the room {room!r} is not in the table"
            continue
        for found in reader.imports:
            if found.target.split(".")[0] != "kvkeep":
                continue
            other = room_of(found.target)
            if other == room or (room in BASE and found.when == "types"):
                continue
            allowed = BASE_OF.get(room, BASE)
            if room not in BASE:
                allowed = allowed | ROOMS[room]
            if found.when == "types":
                allowed = allowed | TYPES_ONLY.get(room, set())
            if other not in allowed:
                yield f"{found}: {room or 'the package'} may not use {other or 'the package'}"


def wrong_external(sources: Sources) -> Iterator[str]:
    for module, reader in read(sources).items():
        for found in reader.imports:
            package = found.target.split(".")[0]
            if package == "kvkeep" or package in sys.stdlib_module_names:
                continue
            if not within(module, EXTERNAL.get(package, set())):
                yield f"{found}: {package} has no place there"
        if reader.computed and module not in COMPUTED:
            yield f"{module}:{reader.computed[0]} imports what a variable names"


def run_time(sources: Sources) -> Mapping[str, list[str]]:
    """Module → what is imported with it, packages around it included."""
    graph: dict[str, list[str]] = {}
    for module, reader in read(sources).items():
        targets: list[str] = []
        for found in reader.imports:
            if found.when != "run":
                continue
            parts = found.target.split(".")
            for length in range(1, len(parts) + 1):
                name = ".".join(parts[:length])
                # The packages around a module are on their way already when it is imported.
                if name != module and not module.startswith(name + ".") and name not in targets:
                    targets.append(name)
        graph[module] = targets
    return graph


def cycles(sources: Sources) -> Iterator[str]:
    graph = run_time(sources)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            yield " → ".join([*path[path.index(module) :], module])
            return
        if module in done or module not in graph:
            return
        for target in graph[module]:
            yield from walk(target, [*path, module])
        done.add(module)

    for module in graph:
        yield from walk(module, [])


def reached(sources: Sources, start: str) -> set[str]:
    """Everything that is imported with ``start``."""
    graph = run_time(sources)
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += graph.get(module, [])
    return seen


# --- the house -------------------------------------------------------------------------------


def test_imports_go_one_way() -> None:
    assert list(wrong_direction(modules())) == []


def test_what_is_not_ours_is_imported_where_it_belongs() -> None:
    assert list(wrong_external(modules())) == []


def test_no_modules_import_each_other() -> None:
    assert list(cycles(modules())) == []


def test_the_table_itself_goes_one_way() -> None:
    """A room that another uses may not use that one, by whatever way."""
    order: list[str] = []

    def place(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " → ".join([*path, room])
        if room not in order:
            for other in sorted(ROOMS[room]):
                place(other, (*path, room))
            order.append(room)

    for room in ROOMS:
        place(room, ())
    assert not any("cli" in allowed or "" in allowed for allowed in ROOMS.values())


def test_importing_the_package_reaches_numpy_and_nothing_heavy() -> None:
    packages = {module.split(".")[0] for module in reached(modules(), "kvkeep")}
    assert "numpy" in packages
    assert packages - set(sys.stdlib_module_names) == {"kvkeep", "numpy"}


def test_the_reader_sees_the_whole_house() -> None:
    """Else all of the above would hold of an empty folder."""
    found = modules()
    assert {"kvkeep", "kvkeep.cache.paged", "kvkeep.prefix", "kvkeep.errors"} <= set(found)
    assert all(name in {room_of(module) for module in found} for name in ("pages", "eviction"))
    graph = run_time(found)
    assert "kvkeep.pages.pool" in graph["kvkeep.pages"]
    assert "numpy" in graph["kvkeep.pages.pool"]


# --- the test of the test --------------------------------------------------------------------

HOUSE = {
    "kvkeep": "from kvkeep.cache import PagedCache",
    "kvkeep.cache": "from kvkeep.cache.paged import PagedCache",
    "kvkeep.cache.paged": "from kvkeep.pages import pool\nfrom kvkeep import errors",
    "kvkeep.pages": "",
    "kvkeep.pages.pool": "import numpy as np\nfrom kvkeep.errors import InvalidValue",
    "kvkeep.errors": "",
    "kvkeep.engine": "import torch\ndef late():\n    import transformers",
}


def violations(module: str, source: str) -> list[str]:
    sources = {**HOUSE, module: source}
    return [*wrong_direction(sources), *wrong_external(sources), *cycles(sources)]


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("kvkeep.pages.bad", "from kvkeep.prefix import RadixIndex", "pages may not use prefix"),
        ("kvkeep.pages.bad", "import kvkeep.prefix.tree", "pages may not use prefix"),
        ("kvkeep.pages.bad", "from ..prefix import radix", "pages may not use prefix"),
        ("kvkeep.pages.bad", "def f():\n    from kvkeep.cache import x", "pages may not use cache"),
        ("kvkeep.pages.bad", "class A:\n    import kvkeep.cli", "pages may not use cli"),
        ("kvkeep.pages.bad", "try:\n    import kvkeep.cache\nexcept ImportError: ...", "cache"),
        ("kvkeep.pages.bad",
         "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvkeep.prefix import Run",
         "pages may not use prefix"),
        ("kvkeep.prefix.bad", "from kvkeep.pages.table import PageArray", "may not use pages"),
        ("kvkeep.prefix.bad", "require('kvkeep.cache', '')", "prefix may not use cache"),
        ("kvkeep.cache.bad", "from kvkeep.engine import Engine", "cache may not use engine"),
        ("kvkeep.errors", "from kvkeep.tokens import x\nfrom kvkeep.cache import y", "use cache"),
        ("kvkeep.cache.bad", "import kvkeep", "cache may not use the package"),
        ("kvkeep.telemetry.bad", "from kvkeep.keys import x", "telemetry may not use keys"),
        ("kvkeep.attic", "", "the room 'attic' is not in the table"),
        ("kvkeep.cache.bad", "import torch", "torch has no place there"),
        ("kvkeep.pages.bad", "import torch.nn", "torch has no place there"),
        ("kvkeep.pages.tensors.bad", "import transformers", "transformers has no place there"),
        ("kvkeep.cache.bad", "def f():\n    import torch", "torch has no place there"),
        ("kvkeep.cache.bad", "import importlib\nimportlib.import_module('torch')", "torch has no"),
        ("kvkeep.cache.bad", "require('rich', 'cli')", "rich has no place there"),
        ("kvkeep.cache.bad", "import requests", "requests has no place there"),
        ("kvkeep.cache.bad", "require(name, 'torch')", "imports what a variable names"),
        ("kvkeep.cache.bad", "import_module(f'{name}.x')", "imports what a variable names"),
        ("kvkeep.cache.bad", "import_module(f'kvkeep.cli.{name}')", "cache may not use cli"),
        ("kvkeep.pages", "from kvkeep.pages.pool import PagePool", None),
        ("kvkeep.pages.tensors", "import torch", None),
        ("kvkeep.prefix.good", "if TYPE_CHECKING:\n    from kvkeep.pages.table import x", None),
        ("kvkeep.events", "if TYPE_CHECKING:\n    from kvkeep.pages.table import x", None),
        ("kvkeep.__main__", "from kvkeep.cli import main", None),
        ("kvkeep.cli", "from kvkeep.engine import Engine\nimport json, rich", None),
        ("kvkeep.prefix.render", "def draw():\n    from rich.tree import Tree", None),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(module: str, source: str, said: str | None) -> None:
    assert violations("kvkeep.pages", "") == []
    found = violations(module, source)
    if said:
        assert any(said in line for line in found), found
    else:
        assert found == []


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"a": "import kvkeep.pages.b", "b": "from kvkeep.pages.a import x"}, "a → kvkeep.pages.b"),
        ({"a": "from kvkeep.pages import b", "b": "from . import a"}, "a → kvkeep.pages.b"),
        ({"a": "import kvkeep.pages.b", "b": "def f():\n    import kvkeep.pages.a"}, None),
        ({"a": "import kvkeep.pages.b",
          "b": "if TYPE_CHECKING:\n    import kvkeep.pages.a"}, None),
    ],
)  # fmt: skip
def test_a_planted_cycle_is_found(sources: Sources, cycle: str | None) -> None:
    planted = {f"kvkeep.pages.{name}": source for name, source in sources.items()}
    found = list(cycles({**HOUSE, **planted}))
    assert any(cycle in line for line in found) if cycle else found == []


def test_a_heavy_import_is_found_wherever_it_is_reached() -> None:
    deep = {**HOUSE, "kvkeep.pages.pool": "from kvkeep.pages.deeper import x",
            "kvkeep.pages.deeper": "import torch"}  # fmt: skip
    assert "torch" in reached(deep, "kvkeep")
    late = {**deep, "kvkeep.pages.deeper": "def f():\n    import torch"}
    assert "torch" not in reached(late, "kvkeep")
