"""The direction between the rooms, read from the imports of every module in ``src/kvkeep``."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = Path(__file__).parents[1] / "src"

# The floors, from the ground up: a room uses rooms of its own floor and of those below. What is
# beside each other in a row does not know each other.
FLOORS: list[set[str]] = [
    {"core"},
    {"store"},
    {"observe", "bench"},
    {"serve"},
    {"integrations", "testing"},
    {"cli"},
]

# What every room may use; among themselves they are in order, and use no room.
BASE = {
    "core.errors", "core.tokens", "core.extras", "core.geometry", "core.keys", "core.public",
    "core.events",
}  # fmt: skip

# Which rooms a room may use, besides the base. "" is `kvkeep/__init__.py`, the public names. The
# `__init__` of a floor is a room as well: it has the floor's public names, or nothing.
ROOMS: dict[str, set[str]] = {
    "": {"core.cache", "core.pages", "core.slots"},
    "core": set(),
    "core.pages": set(),  # does not know that prefixes exist
    "core.slots": set(),  # contiguous caches: nothing of theirs is a page
    "core.cost": set(),  # sees tokens, bytes and seconds as numbers
    "core.returns": set(),  # sees ends of requests and seconds; no pages, no tokens
    "core.prefix": {"core.pages"},
    "core.eviction": {"core.prefix", "core.returns"},  # policies order the runs of a tree
    "core.miss_ratio": set(),  # sees keys, tokens and page ids of prompts, not the cache
    "core.groups": {"core.pages", "core.prefix"},  # what hybrid models keep beside base pages
    "core.cache": {
        "core.pages", "core.prefix", "core.eviction", "core.returns", "core.miss_ratio",
        "core.groups",
    },
    "store": {"store.kv", "store.blocks", "store.identity", "store.tiers"},
    "store.codecs": set(),
    "store.backends": set(),  # see keys and bytes, no tokens and no tensors
    "store.tiers": {
        "store.backends", "store.codecs", "core.cost", "core.eviction", "core.returns",
    },
    "store.identity": set(),  # sees modules and files of weights, nothing that is stored
    "store.blocks": {
        "store.tiers", "store.backends", "store.codecs", "core.cost", "core.returns",
    },
    "store.kv": {
        "store.blocks", "store.identity", "store.tiers", "store.codecs", "store.backends",
        "core.cost", "core.returns",
    },
    "observe": set(),
    "observe.usage": set(),  # events of requests, in plain values; neither cache nor engine
    # sees events, tokens and what stores say; neither cache nor engine
    "observe.explain": {"observe.usage", "observe.telemetry"},  # texts made visible
    "observe.telemetry": {"observe.usage"},
    "bench": set(),
    "bench.traces": set(),  # requests with their times; what replays them is another room
    "bench.replay": {
        "core.cache", "core.cost", "core.eviction", "core.returns", "core.groups", "store.tiers",
        "store.backends",  # write budgets
        "bench.traces",
    },
    "serve": set(),
    "serve.models": set(),
    "serve.engine": {
        "core.cache", "core.cost", "core.pages", "core.groups", "core.returns",
        "store", "store.identity", "serve.models",
        "observe.usage",  # the events that it emits
    },
    "serve.http": set(),  # holds against hostile clients: of requests it knows bytes alone
    "serve.kv_events": set(),  # on the wire; of a cache it knows the hook
    "serve.messages": set(),  # one API in terms of another: JSON values alone
    "serve.router": {"core.cost", "serve.kv_events", "serve.http"},
    "serve.server": {
        "core.cache", "core.cost",
        "core.returns",  # how answers ended, for a capture
        "core.prefix",  # to draw it
        "bench.traces",  # to capture one
        "observe.explain",  # why prompts missed
        "observe.telemetry",
        "observe.usage",
        "serve.engine",
        "serve.http",
        "serve.messages",
    },
    "integrations": {
        "core.cache", "core.cost", "core.prefix", "core.eviction", "core.pages", "core.returns",
        "store", "store.kv", "store.blocks", "store.identity", "store.tiers", "store.backends",
    },
    "testing": {
        "core.cache", "core.prefix", "core.eviction", "core.pages",
        "store", "store.tiers", "store.backends", "store.codecs",
    },
    "cli": {
        "core.cache", "core.cost", "core.prefix", "core.eviction", "core.groups",
        "store", "store.tiers", "store.backends", "store.codecs", "store.identity",
        "observe.telemetry", "observe.usage",
        "bench.replay", "bench.traces",
        "serve.engine", "serve.models", "serve.server", "serve.kv_events", "serve.http",
        "serve.router",
        "integrations",  # the options of connectors
    },
}  # fmt: skip
# Under TYPE_CHECKING alone: the names of types, where a room handles what is another's.
TYPES_ONLY = {
    "observe.usage": {"store"},  # what a store says of tokens that it did not give
    "observe.explain": {"store", "core.groups"},  # `GroupLayout`, where a model can resume
    "serve.server": {"store", "store.tiers"},  # what the store of its engine tells
}
# Rooms that may not even use all of the base.
BASE_OF = {
    "observe.telemetry": {"core.events", "core.errors"},
    "store.backends": {"core.errors", "core.keys", "core.events", "core.geometry"},
}

# Who may import what is not ours and not the standard library: a room, or one module of it.
EXTERNAL: dict[str, set[str]] = {
    "numpy": {""},  # everybody
    "torch": {
        "core.pages.tensors", "core.slots", "core.groups.tensors",
        "store.kv", "store.identity", "store.codecs", "serve.engine", "integrations",
    },
    "vllm": {"integrations.vllm", "integrations.vllm_plugin"},
    "sglang": {"integrations.sglang"},
    # where the models of engines lie
    "huggingface_hub": {"integrations.loaded"},
    "psutil": {"integrations.loaded"},  # when the process of an engine began; engines bring it
    "transformers": {
        "core.geometry.huggingface",  # late, to read a configuration as it does
        "serve.engine", "integrations",
        "cli.model",  # to quieten its progress bars
        "cli.tree",  # says which extras the command needs together
    },
    "flash_attn": {"serve.engine.attention.flash"},  # if it is installed
    "flash_attn_interface": {"serve.engine.attention.flash"},
    "safetensors": {"serve.engine"},
    "xxhash": {"store.tiers", "store.identity"},
    "numcodecs": {"store.codecs"},
    "cryptography": {"store.codecs"},
    "obstore": {"store.backends.objects"},
    "zstandard": {"bench.traces.fields"},
    "jinja2": {"serve.engine", "integrations.vllm.public"},
    "opentelemetry": {"observe.telemetry"},
    "fastapi": {"serve.server"},
    "starlette": {"serve.server", "serve.router", "serve.http", "cli.route"},
    "uvicorn": {"serve.server", "serve.http", "cli.route"},
    "h11": {"serve.http"},
    "pydantic": {"serve.server"}, "pydantic_core": {"serve.server"},
    "prometheus_client": {"serve.server", "serve.router", "serve.http", "cli.route"},
    # The command says which extra is missing before anything is begun.
    "zmq": {"serve.kv_events", "serve.router", "cli.route"},
    "msgspec": {"serve.kv_events", "serve.router"},
    "httpx": {"serve.router", "cli.route"},
    "rich": {"cli", "core.prefix.render"},
    "pytest": {"testing"},
    "hypothesis": {"testing"},
}  # fmt: skip

# Who imports what a variable names, which cannot be read here: `require`; the demo, whose prompts
# are documentation of the standard library; the suites and the store's public names, each imported
# when it is asked for.
COMPUTED = {"kvkeep.core.errors", "kvkeep.cli.demo", "kvkeep.testing"}

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


@cache
def modules() -> Sources:
    """Every module of the package; it is read once."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module, which nobody changes."""
    return ast.parse(source)


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
        if not isinstance(node.test, ast.Name | ast.Attribute) or ast.unparse(node.test) not in {
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        }:
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


_READ: list[tuple[Sources, dict[str, Reader]]] = []
"""What `read` has found in the sources that it was given last."""


def read(sources: Sources) -> dict[str, Reader]:
    if _READ and _READ[0][0] is sources:
        return _READ[0][1]
    readers = {}
    for module, source in sources.items():
        readers[module] = Reader(module, sources)
        readers[module].visit(parsed(source))
    _READ[:] = [(sources, readers)]
    return readers


def room_of(module: str) -> str:
    """The room of one of our modules, with its floor: "" for the package itself.

    A floor without rooms, as `cli`, is one room. Running the package is the cli's.
    """
    floor, _, rest = module.partition(".")[2].partition(".")
    if floor == "__main__":
        return "cli"
    room = rest.partition(".")[0]
    has_rooms = any(name.startswith(f"{floor}.") for name in ROOMS)
    return f"{floor}.{room}" if room and has_rooms else floor


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


def circles(sources: Sources) -> list[list[str]]:
    """Modules that import each other by some way, imports for types included: largest first."""
    graph = {
        module: {
            other.target
            for other in reader.imports
            if other.when != "late" and other.target in sources and other.target != module
        }
        for module, reader in read(sources).items()
    }
    reach = {module: reachable(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return sorted((list(circle) for circle in found), key=lambda circle: (-len(circle), circle))


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What ``start`` imports, and what that imports; ``start`` itself if it is in a circle."""
    seen: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += graph[module]
    return seen


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


# Room → modules in circles of imports, those for types included: each circle is one thing that was
# torn apart. A number may only fall; a room without circles leaves the table.
CIRCLES: dict[str, int] = {
    "cli": 2, "serve.engine": 3, "serve.server": 2,
}  # fmt: skip


def test_circles_with_imports_for_types_only_shrink() -> None:
    found = circles(modules())
    counts = Counter(room_of(module) for circle in found for module in circle)
    assert counts == CIRCLES, found


def test_a_planted_circle_for_types_is_found() -> None:
    planted = {
        "kvkeep.house.a": "import kvkeep.house.b",
        "kvkeep.house.b": "if TYPE_CHECKING:\n    from kvkeep.house.c import x",
        "kvkeep.house.c": "from kvkeep.house.a import y",
    }
    assert circles(HOUSE) == []
    assert circles({**HOUSE, **planted}) == [sorted(planted)]


# Room → its lines at most, docstrings and blank lines included. A number may only fall,
# unless a capability is added; a room that is 300 lines smaller lowers it.
LINES: dict[str, int] = {
    "": 100, "bench": 50, "bench.replay": 3850, "bench.traces": 2700, "cli": 7100, "core": 50,
    "core.cache": 2850, "core.cost": 800, "core.errors": 300, "core.events": 300,
    "core.eviction": 950, "core.extras": 150, "core.geometry": 1400, "core.groups": 1800,
    "core.keys": 150, "core.miss_ratio": 450, "core.pages": 800, "core.prefix": 2400,
    "core.public": 300, "core.returns": 500, "core.slots": 550, "core.tokens": 200,
    "integrations": 11650, "observe": 50, "observe.explain": 1500, "observe.telemetry": 600,
    "observe.usage": 750, "serve": 50, "serve.engine": 8000, "serve.http": 1100,
    "serve.kv_events": 1500, "serve.messages": 800, "serve.models": 50, "serve.router": 3750,
    "serve.server": 6300, "store": 100, "store.backends": 6650, "store.blocks": 850,
    "store.codecs": 1550, "store.identity": 1450, "store.kv": 3200, "store.tiers": 8700,
    "testing": 1050,
}  # fmt: skip


def test_rooms_only_shrink() -> None:
    counts = Counter[str]()
    for module, source in modules().items():
        counts[room_of(module)] += source.count("\n")
    grew = {room: f"{count} lines" for room, count in counts.items() if count > LINES.get(room, 0)}
    assert grew == {}, "larger than the table allows"
    slack = {room: f"{counts[room]} lines" for room in LINES if LINES[room] - counts[room] >= 300}
    assert slack == {}, "the table allows more than there is: lower it"


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


def test_the_table_goes_from_floor_to_floor_downwards() -> None:
    height = {floor: number for number, row in enumerate(FLOORS) for floor in row}
    for room, allowed in ROOMS.items():
        floor = room.partition(".")[0]
        if not floor:
            continue
        for other in allowed:
            below = other.partition(".")[0]
            same = below == floor
            assert same or height[below] < height[floor], f"{room} uses {other}, which is above it"
    folders = {path.parent.name for path in (SOURCE / "kvkeep").glob("*/__init__.py")}
    assert folders == set(height), "the listing of the folder is the architecture"


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("kvkeep", {"kvkeep"}),
        ("kvkeep.cli", {"kvkeep"}),
        ("kvkeep.core.cache", {"kvkeep", "numpy"}),
    ],
)
def test_importing_reaches_nothing_heavy(module: str, wanted: set[str]) -> None:
    packages = {one.split(".")[0] for one in reached(modules(), module)}
    assert packages - set(sys.stdlib_module_names) == wanted


def test_the_reader_sees_the_whole_house() -> None:
    """Else all of the above would hold of an empty folder."""
    found = modules()
    some = {"kvkeep", "kvkeep.core.cache.cache", "kvkeep.core.prefix", "kvkeep.core.errors"}
    assert some <= set(found)
    assert {room_of(module) for module in found} == {*ROOMS, *BASE}
    graph = run_time(found)
    assert "kvkeep.core.pages.pool" in graph["kvkeep.core.pages"]
    assert "numpy" in graph["kvkeep.core.pages.pool"]


# --- one word, one thing ---------------------------------------------------------------------

# Names of classes that mean two things, and why that is right.
TWICE: dict[str, str] = {}


def homonyms(sources: Sources) -> dict[str, list[str]]:
    """Public names of classes that stand in several modules."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_no_two_classes_have_one_name() -> None:
    found = homonyms(modules())
    assert found.keys() == TWICE.keys(), found


def test_a_planted_homonym_is_found() -> None:
    planted = {"kvkeep.core.a": "class Held: ...", "kvkeep.store.b": "class Held: ..."}
    assert homonyms({**HOUSE, **planted}) == {"Held": ["kvkeep.core.a", "kvkeep.store.b"]}


# --- the test of the test --------------------------------------------------------------------

HOUSE = {
    "kvkeep": "from kvkeep.core.cache import PagedCache",
    "kvkeep.core.cache": "from kvkeep.core.cache.cache import PagedCache",
    "kvkeep.core.cache.cache": "from kvkeep.core.pages import pool\nfrom kvkeep.core import errors",
    "kvkeep.core.pages": "",
    "kvkeep.core.pages.pool": "import numpy as np\nfrom kvkeep.core.errors import InvalidValue",
    "kvkeep.core.errors": "",
    "kvkeep.serve.engine": "import torch\ndef late():\n    import transformers",
}


PAGES, PREFIX, CACHE = (f"kvkeep.core.{room}.bad" for room in ("pages", "prefix", "cache"))


def violations(module: str, source: str) -> list[str]:
    sources = {**HOUSE, module: source}
    return [*wrong_direction(sources), *wrong_external(sources), *cycles(sources)]


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        (PAGES, "from kvkeep.core.prefix import Tree", "core.pages may not use core.prefix"),
        (PAGES, "import kvkeep.core.prefix.tree", "core.pages may not use core.prefix"),
        (PAGES, "from ..prefix import radix", "core.pages may not use core.prefix"),
        (PAGES, "def f():\n    from kvkeep.core.cache import x", "may not use core.cache"),
        (PAGES, "class A:\n    import kvkeep.cli", "core.pages may not use cli"),
        (PAGES, "try:\n    import kvkeep.core.cache\nexcept ImportError: ...", "core.cache"),
        (PAGES,
         "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvkeep.core.prefix",
         "core.pages may not use core.prefix"),
        (PREFIX, "from kvkeep.core.eviction import LRU", "may not use core.eviction"),
        (PREFIX, "require('kvkeep.core.cache', '')", "core.prefix may not use core.cache"),
        (CACHE, "from kvkeep.serve.engine import Engine", "core.cache may not use serve.engine"),
        ("kvkeep.core.errors", "import kvkeep.core.tokens, kvkeep.core.cache", "use core.cache"),
        (CACHE, "import kvkeep", "may not use the package"),
        ("kvkeep.observe.telemetry.bad", "import kvkeep.core.keys", "may not use core.keys"),
        ("kvkeep.attic", "", "the room 'attic' is not in the table"),
        ("kvkeep.core.attic", "", "the room 'core.attic' is not in the table"),
        ("kvkeep.store.kv.bad", "import kvkeep.serve.engine", "may not use serve.engine"),
        (CACHE, "import torch", "torch has no place there"),
        (PAGES, "import torch.nn", "torch has no place there"),
        ("kvkeep.core.pages.tensors.bad", "import transformers", "transformers has no place there"),
        (CACHE, "def f():\n    import torch", "torch has no place there"),
        (CACHE, "import importlib\nimportlib.import_module('torch')", "torch has no"),
        (CACHE, "require('rich', 'cli')", "rich has no place there"),
        (CACHE, "import requests", "requests has no place there"),
        (CACHE, "require(name, 'torch')", "imports what a variable names"),
        (CACHE, "import_module(f'{name}.x')", "imports what a variable names"),
        (CACHE, "import_module(f'kvkeep.cli.{name}')", "core.cache may not use cli"),
        ("kvkeep.core.pages", "from kvkeep.core.pages.pool import PagePool", None),
        ("kvkeep.core.pages.tensors", "import torch", None),
        ("kvkeep.core.prefix.good", "if TYPE_CHECKING:\n    import kvkeep.core.pages.pool", None),
        ("kvkeep.core.events", "if TYPE_CHECKING:\n    import kvkeep.core.pages.pool", None),
        ("kvkeep.__main__", "from kvkeep.cli import main", None),
        ("kvkeep.cli", "from kvkeep.serve.engine import Engine\nimport json, rich", None),
        ("kvkeep.core.prefix.render", "def draw():\n    from rich.tree import Tree", None),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(module: str, source: str, said: str | None) -> None:
    assert violations("kvkeep.core.pages", "") == []
    found = violations(module, source)
    if said:
        assert any(said in line for line in found), found
    else:
        assert found == []


@pytest.mark.parametrize(
    ("sources", "cycle"),
    [
        ({"a": "import kvkeep.house.b", "b": "from kvkeep.house.a import x"}, "a → kvkeep.house.b"),
        ({"a": "from kvkeep.house import b", "b": "from . import a"}, "a → kvkeep.house.b"),
        ({"a": "import kvkeep.house.b", "b": "def f():\n    import kvkeep.house.a"}, None),
        ({"a": "import kvkeep.house.b",
          "b": "if TYPE_CHECKING:\n    import kvkeep.house.a"}, None),
    ],
)  # fmt: skip
def test_a_planted_cycle_is_found(sources: Sources, cycle: str | None) -> None:
    planted = {f"kvkeep.house.{name}": source for name, source in sources.items()}
    found = list(cycles({**HOUSE, **planted}))
    assert any(cycle in line for line in found) if cycle else found == []


def test_a_heavy_import_is_found_wherever_it_is_reached() -> None:
    deep = {**HOUSE, "kvkeep.core.pages.pool": "from kvkeep.core.pages.deeper import x",
            "kvkeep.core.pages.deeper": "import torch"}  # fmt: skip
    assert "torch" in reached(deep, "kvkeep")
    late = {**deep, "kvkeep.core.pages.deeper": "def f():\n    import torch"}
    assert "torch" not in reached(late, "kvkeep")


# --- objects keep to themselves --------------------------------------------------------------

# Names that begin with an underscore and are documented by their library all the same.
DOCUMENTED = {
    "_ActionsContainer", "_ArgumentGroup", "_SubParsersAction",  # argparse: types of its methods
    "_exit",  # os
    "_make", "_replace",  # named tuples
}  # fmt: skip

# Module → how often it reaches into private attributes of other objects. A number may only fall;
# a module that is clean leaves the table.
REACHES: dict[str, int] = {
    # Libraries that offer no other way:
    "kvkeep.integrations.sglang.settings": 1,  # the fields of its configuration
    "kvkeep.integrations.transformers_model": 1,  # _supports_logits_to_keep
    "kvkeep.integrations.vllm.offload.requests": 1,  # positions that vLLM notes by key
    "kvkeep.serve.engine.attention.dense": 1,  # torch's attention that returns log-sum-exps
    "kvkeep.serve.engine.attention.batch": 1,  # _attn_implementation
    "kvkeep.serve.engine.loading": 2,  # oneDNN's packed layers
    "kvkeep.store.identity.modules": 12,  # torch's modules, read without their hooks
    "kvkeep.store.identity.watch": 1,
}


class Privates(ast.NodeVisitor):
    """Collects ``x._y``, ``getattr(x, "_y")``, ``attrgetter("_y")`` and ``vars(x)["_y"]``.

    Not of ``self``, nor where the class around it has a ``_y`` of its own.
    """

    def __init__(self) -> None:
        self.own: list[set[str]] = []
        self.found: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.own.append(private_names(node))
        self.generic_visit(node)
        self.own.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.note(node, node.value, node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in {"getattr", "setattr", "hasattr", "delattr"} and len(node.args) > 1:
            value, attribute = node.args[:2]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                self.note(node, value, attribute.value)
        if name == "attrgetter" or ast.unparse(node.func).endswith(".attrgetter"):
            for attribute in node.args:
                for part in str(getattr(attribute, "value", "")).split("."):
                    self.note(node, node.func, part)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        value, key = node.value, node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            if isinstance(value, ast.Attribute) and value.attr == "__dict__":
                self.note(node, value.value, key.value)
            elif isinstance(value, ast.Call) and ast.unparse(value.func) == "vars" and value.args:
                self.note(node, value.args[0], key.value)

    def note(self, node: ast.expr, value: ast.expr, name: str) -> None:
        private = name.startswith("_") and not name.startswith("__")
        if not private or name in DOCUMENTED or of_self(value):
            return
        if not any(name in names for names in self.own):  # else another object of the class
            self.found.append(f"{node.lineno}: {ast.unparse(node)}")


def of_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def private_names(node: ast.ClassDef) -> set[str]:
    """Names with an underscore that a class defines, or sets on ``self``."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names |= {inner.attr} if of_self(inner.value) else set()
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            names |= set(ast.literal_eval(statement.value))
    return {name for name in names if name.startswith("_")}


def reaches(sources: Sources) -> dict[str, list[str]]:
    """Module → where it reaches into private attributes of other objects."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        reader = Privates()
        reader.visit(parsed(source))
        if reader.found:
            found[module] = reader.found
    return found


def grown(found: Mapping[str, int], allowed: Mapping[str, int], most: int) -> list[str]:
    """What is above ``most`` and its allowance, and allowances that nothing needs."""
    above = {name: count for name, count in found.items() if count > most}
    wrong = [
        f"{name}: {count}, at most {allowed.get(name, most)}"
        for name, count in above.items()
        if count > allowed.get(name, most)
    ]
    return wrong + [f"{name}: take it out of the table" for name in allowed.keys() - above.keys()]


def test_nothing_reaches_into_another_object() -> None:
    found = reaches(modules())
    counts = {module: len(where) for module, where in found.items()}
    assert grown(counts, REACHES, 0) == [], found


def test_a_planted_reach_is_found() -> None:
    reach = "class A:\n    def f(self, b):\n        return b._x + self._x + super()._x"
    twin = "class A:\n    def __init__(self, a):\n        self._x = a._x"
    assert reaches({"kvkeep.a": reach, "kvkeep.b": twin}) == {"kvkeep.a": ["3: b._x"]}
    hidden = "def f(b):\n    return getattr(b, '_x', None)"
    assert reaches({"kvkeep.a": hidden}) == {"kvkeep.a": ["2: getattr(b, '_x', None)"]}
    for other in ("vars(b)['_x']", "b.__dict__['_x']", "operator.attrgetter('y._x')(b)"):
        (found,) = reaches({"kvkeep.a": f"def f(b):\n    return {other}"})["kvkeep.a"]
        assert found == f"2: {other.removesuffix('(b)')}"
