"""The documentation site: it builds without a warning, its links lead somewhere, nothing is stale.

Commands that documents show are held against the parsers, addresses against the server's own
document, extras against the package's. Links to other hosts are not followed.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import warm

pytest.importorskip("mkdocs", reason="the site needs what requirements-dev.txt names")

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# What a document shows in place of a value.
_PLACEHOLDER = re.compile(r"[A-Z]+…?|…")
SETTINGS = ROOT / "examples" / "kvkeep.toml"
_NO_COMMANDS = {"kvkeep namespace 1", "kvkeep record key 1"}  # texts that are hashed
_FETCHING = {"href", "xlink:href", "src", "srcset", "poster", "data"}

sys.path.insert(0, str(ROOT / "scripts"))
from docs_site.api import listed  # noqa: E402 - beside mkdocs.yml, and no package of ours
from docs_site.commands import commands  # noqa: E402
from docs_site.http import document  # noqa: E402


class Page(HTMLParser):
    """What a built page links to, and what in it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.names: set[str] = set()
        self.drawings = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.names.add(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in _FETCHING:  # an href of others than <a> is fetched as well
                self.fetched.append(value or "")
        self.drawings += tag == "svg" and ("class", "kvd") in attrs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` builds, once for all workers; a warning of mkdocs is an error."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "docs-site", shared / "docs-site.done"
    with (shared / "docs-site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build(folder)
            done.touch()
    return folder


# What warns is not ours; without ruff signatures are not broken into lines, by a process for each.
_BUILD = """
import sys, warnings
warnings.resetwarnings()
sys.modules["ruff"] = None
from mkdocs.__main__ import cli
cli()
"""


def _build(folder: Path) -> None:
    done = warm.run(
        [*warm.PYTHON, "-c", _BUILD, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def _within(site: Path, page: Path, link: str) -> tuple[Path, str] | None:
    """The file and the name in it that a link means; None for one that leaves the site."""
    address, name = urldefrag(link)
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    if not path:
        return page, unquote(name)
    found = (site / path.lstrip("/")) if path.startswith("/") else (page.parent / path)
    return (found / "index.html" if found.is_dir() else found).resolve(), unquote(name)


# --- the site -------------------------------------------------------------------------------------


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    followed = 0
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            target = _within(site, path, link)
            if target is None or link.startswith("data:"):
                continue
            file, name = target
            followed += 1
            known = pages.get(file)
            if not file.is_file() or (known and name and name not in known.names):
                broken.append(f"{path.relative_to(site)} → {link}")
    assert not broken, "\n".join(broken)
    assert followed > 1000


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for address in page.fetched:
            assert not urlsplit(address).netloc, f"{path.name} fetches {address}"
    for style in site.rglob("*.css"):
        for address in re.findall(r"url\(([^)]+)\)", style.read_text("utf-8")):
            assert "//" not in address.split(",")[0], f"{style.name} fetches {address[:80]}"


def test_a_folder_can_be_searched(site: Path, browser) -> None:
    """Without a server, and without a network: browsers refuse workers on file://."""
    page = browser.new_page()
    said, asked = [], []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    for start in ("index.html", "how-to/sizing.html"):
        page.goto((site / start).as_uri())
        page.keyboard.press("f")
        page.locator("input.md-search__input").press_sequentially("what more memory would do")
        found = page.locator(".md-search-result__item a").first
        found.wait_for(timeout=120_000)
        assert "/what-if.html" in found.get_attribute("href")
    page.close()
    assert said == []
    assert all(url.startswith("file:") for url in asked)


def test_no_word_of_the_search_index_is_a_wildcard(site: Path) -> None:
    """With a word such as ``deploy/*.service``, lunr fails when a ``d`` has been typed."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    separator = re.compile(index["config"]["separator"])
    assert separator.split("deploy/*.service") == ["deploy/", ".service"]
    assert any("*" in page["text"] for page in index["docs"])


def test_every_document_is_a_page_that_the_contents_show(
    site: Path, pages: dict[Path, Page]
) -> None:
    start = pages[site / "index.html"]
    shown = {
        found[0] for link in start.links if (found := _within(site, site / "index.html", link))
    }
    for source in DOCS.rglob("*.md"):
        page = (site / source.relative_to(DOCS)).with_suffix(".html").resolve()
        assert page in shown, f"docs/{source.relative_to(DOCS)} is not in the nav of mkdocs.yml"


def test_the_contents_show_each_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = re.findall(r"^ +- .*?(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert len(named) > 40
    assert not [page for page, times in Counter(named).items() if times > 1]


def test_links_are_named_after_what_they_lead_to(site: Path) -> None:
    for path in site.rglob("*.html"):
        left = re.findall(r"[\w-]+\.md</a>", path.read_text("utf-8"))
        assert not left, f"{path.name} has links named {', '.join(left)}"


def test_images_exist_and_drawings_are_part_of_the_page(pages: dict[Path, Page]) -> None:
    drawn = Counter({path: page.drawings for path, page in pages.items()})
    named = re.findall(r"drawings/\w+\.svg\)", "".join(_texts(DOCS.rglob("*.md"))))
    assert drawn.total() == len(named) >= 4
    for image in DOCS.rglob("*.svg"):
        assert "<title" in image.read_text("utf-8") or image.parent.name == "assets", image


def test_a_name_is_on_the_site_once(pages: dict[Path, Page]) -> None:
    rooms = Counter(
        name for page in pages.values() for name in page.names if name.startswith("kvkeep.")
    )
    assert rooms
    assert not [name for name, times in rooms.items() if times > 1]


def test_every_public_name_is_on_a_page(pages: dict[Path, Page]) -> None:
    names = set().union(*(page.names for page in pages.values()))
    for room in sorted(set(_rooms())):
        for name in listed(room):
            assert f"{room}.{name}" in names, f"{room}.{name} is on no page"


def _documented(name: str, of: object, bases: tuple[type, ...] = ()) -> bool:
    """Whether it has a docstring, or overrides a method that has: overrides repeat no contract."""
    own = vars(of).get("__doc__") if isinstance(of, type) else getattr(of, "__doc__", None)
    if own and not own.startswith(f"{name}("):  # what dataclasses and named tuples make up
        return True
    ours = (base for base in bases if base.__module__.startswith("kvkeep."))
    return any(getattr(vars(base).get(name), "__doc__", None) for base in ours)


def _methods(of: type) -> Iterator[tuple[str, object]]:
    for name, member in vars(of).items():
        method = inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(method) and name[0] != "_":
            yield name, member


def test_public_classes_and_functions_have_docstrings() -> None:
    silent, methods = [], 0
    for room in sorted(set(_rooms())):
        for name in listed(room):
            found = getattr(importlib.import_module(room), name)
            shown = isinstance(found, type) or inspect.isfunction(inspect.unwrap(found))
            if shown and not _documented(name, found):
                silent.append(f"{room}.{name}")
            for method, member in _methods(found) if isinstance(found, type) else ():
                methods += 1
                if not _documented(method, member, found.__mro__[1:]):
                    silent.append(f"{room}.{name}.{method}")
    assert methods > 100
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_every_room_with_public_names_is_in_the_reference() -> None:
    shown = set(_rooms())
    package = ROOT / "src/kvkeep"
    floors = ("core", "store", "observe", "bench", "serve")
    files = [file for floor in floors for file in (package / floor).glob("*/__init__.py")]
    for file in [*package.glob("*/__init__.py"), *files]:
        room = ".".join(file.parent.relative_to(package.parent).parts)
        if room not in _INNER and "__all__" in file.read_text("utf-8"):
            assert room in shown, f"{room} is on no page of docs/reference/api"


# Rooms whose public names are those of kvkeep itself, or are nobody's to call.
_INNER = {
    "kvkeep.core.cache",
    "kvkeep.core.pages",
    "kvkeep.serve.models",
    "kvkeep.cli",
    "kvkeep.store.blocks",
    "kvkeep.store.identity",
    "kvkeep.store.kv",
    "kvkeep.serve.http",
    "kvkeep.serve.messages",
}


def _rooms() -> Iterator[str]:
    for text in _texts((DOCS / "reference/api").glob("*.md")):
        yield from re.findall(r"^<!-- kvkeep: api (\S+) -->$", text, re.MULTILINE)


def _texts(files: Iterator[Path]) -> Iterator[str]:
    return (file.read_text("utf-8") for file in sorted(files))


def test_the_command_line_is_there_with_every_option(site: Path) -> None:
    text = (site / "reference/command-line.html").read_text("utf-8")
    for name, parser in commands():
        assert f'id="{name.replace(" ", "-")}"' in text, name
        for option in parser._option_string_actions:
            assert option in text or option in {"-h", "--help"}, f"{name} {option}"


def test_the_http_api_is_there_with_every_address(site: Path) -> None:
    text = (site / "reference/http.html").read_text("utf-8")
    for path in document()["paths"]:
        escaped = path.replace("{", "&#123;").replace("}", "&#125;").replace("_", "&#95;")
        assert escaped in text or path in text, path


# --- what documents show --------------------------------------------------------------------------


def shown_commands() -> list[tuple[str, list[str], bool]]:
    """Every ``kvkeep …`` in a document: where, its words, and whether it is to be run as it is."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for kind, code in _FENCE.findall(text):
            if kind in {"", "sh", "bash"}:
                for line in code.replace("\\\n", " ").splitlines():
                    found += [(path.name, words, True) for words in _calls(line)]
        for inline in _INLINE.findall(_FENCE.sub("", text)):
            if inline not in _NO_COMMANDS:
                found += [(path.name, words, False) for words in _calls(inline)]
    return found


def _calls(line: str) -> Iterator[list[str]]:
    for part in re.split(r"&&|\|(?=\s)|;", line.strip().removeprefix("$ ")):
        if not re.match(r"(\S*/)?kvkeep\s+[a-z]", part.strip()):
            continue
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue  # cut off in the middle of a quotation, by one of the marks above
        yield words[1:]


COMMANDS: dict[str, argparse.ArgumentParser] = dict(commands())


@pytest.mark.parametrize(("where", "words", "whole"), shown_commands(), ids=str)
def test_commands_and_their_options_exist(where: str, words: list[str], whole: bool) -> None:
    name = "kvkeep"
    rest = list(words)
    while rest and f"{name} {rest[0]}" in COMMANDS:
        name = f"{name} {rest.pop(0)}"
    parser = COMMANDS.get(name)
    assert parser is not None, f"{where}: there is no `kvkeep {words[0]}`"
    options = set(parser._option_string_actions)
    rest = [str(SETTINGS) if Path(word).name == SETTINGS.name else word for word in rest]
    for word in rest:
        if re.match(r"--?[a-z]", word):
            option = word.split("=", 1)[0].rstrip(",.")
            assert option in options, f"{where}: {name} has no {option}"
    if whole and not any(_PLACEHOLDER.fullmatch(word) for word in rest):
        parser.exit_on_error = False
        _, unknown = parser.parse_known_args(rest)
        assert not unknown, f"{where}: {name} does not take {' '.join(unknown)}"


def test_there_are_commands_to_hold() -> None:
    assert len(shown_commands()) > 50


def test_addresses_that_documents_ask_exist() -> None:
    known = [re.sub(r"\{[^}]*\}", "[^/]+", path) for path in document()["paths"]] + ["/v1"]
    for path in DOCUMENTS:
        for address in re.findall(r"(?:127\.0\.0\.1|localhost):8000(/[\w/.-]*)", path.read_text()):
            assert any(re.fullmatch(one, address) for one in known) or address in {"/", "/ui"}, (
                f"{path.name} asks {address}"
            )


def test_extras_that_documents_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for path in DOCUMENTS:
        for named in re.findall(r"(?:kvkeep|'\.)\[([a-z,]+)\]", path.read_text("utf-8")):
            for extra in named.split(","):
                assert extra in extras, f"{path.name} installs kvkeep[{extra}]"


def test_scripts_that_documents_run_exist_with_their_options() -> None:
    for path in DOCUMENTS:
        for script, options in re.findall(
            r"python ((?:benchmarks|scripts|examples)/\S+\.py)([^`\n#]*)", path.read_text("utf-8")
        ):
            assert (ROOT / script).is_file(), f"{path.name} runs {script}"
            said = (ROOT / script).read_text("utf-8")
            for option in re.findall(r"--[a-z-]+", options):
                assert f'"{option}"' in said, f"{path.name} gives {script} {option}"


def test_modules_that_documents_name_exist() -> None:
    for path in DOCUMENTS:
        for module in re.findall(
            r"^(?:from|import) (kvkeep[\w.]*)", path.read_text(), re.MULTILINE
        ):
            home = ROOT.joinpath("src", *module.split("."))
            assert home.is_dir() or home.with_suffix(".py").is_file(), f"{path.name}: {module}"


def test_no_python_block_is_broken_in_a_place_that_is_not_run() -> None:
    """Blocks in lists are indented, and so are not among those that are run: there are none."""
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        assert not re.search(r"^ +```python", text, re.MULTILINE), f"{path.name} has one"
        for kind, code in _FENCE.findall(text):
            if kind == "python":
                ast.parse(code)
