"""The text: what the running Python's own standard library says about itself.

Three sources, all under the Python Software Foundation licence (PSF-2.0): the language reference
topics behind ``help()``, the docstrings in the library's sources (read, never imported), and the
docstrings of what is written in C (those exist only at run time).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Entry", "read_corpus"]

# Tests, vendored wheels, the IDE, what is on its way out of the library, and what few ask about.
SKIPPED = """
    test tests idlelib lib2to3 turtledemo ensurepip site-packages distutils encodings pydoc_data
    msilib curses tkinter turtle.py nntplib.py imaplib.py pydoc.py _pyio.py _strptime.py
    antigravity.py this.py __phello__ xml xmlrpc pickletools.py wsgiref cgi.py telnetlib.py
    smtpd.py poplib.py ftplib.py mailbox.py ctypes asyncore.py asynchat.py ntpath.py bdb.py
    genericpath.py
"""

# Where a name is known by another than that of the file it stands in.
PUBLIC_NAMES = {
    "_pydecimal": "decimal",
    "_collections_abc": "collections.abc",
    "posixpath": "os.path",
}
FLAT_PACKAGES = frozenset({"asyncio", "json", "unittest"})  # asyncio.locks.Lock is asyncio.Lock

# Where a part or all of the text is only to be had from the running interpreter.
COMPILED = """
    builtins array binascii bisect cmath collections datetime errno functools gc heapq itertools
    marshal math operator os random re select signal struct sys time unicodedata zlib
"""

ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u2192": "->",
    }
)
HEADING = re.compile(r"^(?P<title>[^\n]+)\n(?P<rule>[*=\-~])(?P=rule){2,}\n", re.MULTILINE)
SHORTEST = 20  # characters: what is shorter says nothing


@dataclass(frozen=True, slots=True)
class Entry:
    """One named object and its documentation.

    ``group`` is where it is found (a module, a topic); ``signature`` is empty for prose.
    """

    group: str
    name: str
    signature: str
    text: str
    is_topic: bool = False


def read_corpus() -> list[Entry]:
    """Every entry of the running Python's standard library, in a fixed order, no name twice."""
    entries: dict[str, Entry] = {}
    for source in (read_topics(), read_compiled(), read_sources()):
        for entry in source:
            if len(entry.text) >= SHORTEST:
                entries.setdefault(entry.name, entry)
    return list(entries.values())


def read_topics() -> Iterator[Entry]:
    """Return the sections of the language reference that ``help('assert')`` and others show."""
    for key in sorted(topics):
        text = topics[key].translate(ASCII)
        heads = list(HEADING.finditer(text))
        for head, following in zip(heads, [*heads[1:], None], strict=True):
            body = text[head.end() : following.start() if following else len(text)]
            title = head["title"].strip().replace('"', "")
            yield Entry(key, title, "", body.strip(), is_topic=True)


def read_sources() -> Iterator[Entry]:
    """The docstrings of public modules, classes and functions, read from their sources."""
    skipped = set(SKIPPED.split())
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if skipped.intersection(parts):
            continue
        module = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        module = PUBLIC_NAMES.get(module, module)
        package = module.partition(".")[0]
        module = package if package in FLAT_PACKAGES else module
        if any(part.startswith("_") for part in module.split(".")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _read_node(tree, module, module)


def _read_node(node: ast.AST, module: str, name: str) -> Iterator[Entry]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    signature = ""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = f"{name}({ast.unparse(node.args)})"
    text = ast.get_docstring(node)
    if text:
        yield Entry(module, name, signature, _tidy(text))
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            child_name = getattr(child, "name", "_")
            if not child_name.startswith("_"):
                yield from _read_node(child, module, f"{name}.{child_name}")


def read_compiled() -> Iterator[Entry]:
    """Return the docstrings of objects written in C, from the running interpreter."""
    for module_name in COMPILED.split():
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, thing in sorted(vars(module).items()):
            if name.startswith("_") or not callable(thing) or not _has_own_words(thing):
                continue
            yield _entry_of(thing, module_name, f"{prefix}{name}")
            if inspect.isclass(thing) and not issubclass(thing, BaseException):
                for member_name, member in sorted(vars(thing).items()):
                    if not member_name.startswith("_") and _has_own_words(member):
                        yield _entry_of(member, module_name, f"{prefix}{name}.{member_name}")


def _has_own_words(thing: object) -> bool:
    """Whether the object has a docstring that no function of this name in a source file has."""
    if not isinstance(getattr(thing, "__doc__", None), str):
        return False
    return inspect.ismethod(thing) or not hasattr(thing, "__code__")  # random.choice is a method


def _entry_of(thing: object, group: str, name: str) -> Entry:
    text = _tidy(inspect.getdoc(thing) or "")
    arguments = getattr(thing, "__text_signature__", None)
    signature = f"{name}{arguments.replace('$', '')}" if isinstance(arguments, str) else ""
    return Entry(group, name, signature, text)


def _tidy(text: str) -> str:
    return inspect.cleandoc(text).translate(ASCII).expandtabs(4)
