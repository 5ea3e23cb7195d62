"""The dashboard's files: who gets them, with which headers, and what they are made of."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from real_server import eventually

from kvkeep.serve.server.guards import PAGE_HEADERS

pytestmark = pytest.mark.model

KEY = "a-long-secret"
ROOT = Path(__file__).parents[2]
FOLDER = Path(str(files("kvkeep.serve.server") / "ui"))
CHARTS = Path(str(files("kvkeep") / "vendor/uplot"))
FILES = {path.name: path for path in FOLDER.iterdir()}
FILES |= {f"vendor/{path.name}": path for path in CHARTS.iterdir()}
NAMES = sorted(FILES)
OURS = [name for name in NAMES if name.endswith((".js", ".html")) and "vendor" not in name]


@pytest.fixture(scope="module")
def locked(start_server):
    with start_server(api_key=KEY) as server:
        yield server


def assert_guarded(answer):
    assert {name: answer.headers.get(name) for name in PAGE_HEADERS} == PAGE_HEADERS


def test_the_page_needs_no_key(locked):
    answer = locked.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert_guarded(answer)
    assert answer.content == (FOLDER / "index.html").read_bytes()
    assert KEY not in answer.text


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_as_what_it_is(locked, name):
    answer = locked.http.get(f"/ui/{name}")
    assert answer.status_code == 200
    assert answer.content == FILES[name].read_bytes()
    kind = {".js": "javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert kind.get(Path(name).suffix, "text/plain") in answer.headers["content-type"]
    assert_guarded(answer)


@pytest.mark.parametrize(
    "path",
    ["/ui/", "/ui/nothing.js", "/ui/%2e%2e/guards.py", "/ui/..%2fguards.py",
     "/ui//etc/passwd", "/ui/%2fetc%2fpasswd", "/ui/vendor", "/ui/vendor/", "/ui/app.js/",
     "/ui/APP.JS", "/ui/app.js%00", "/ui/\\app.js", "/ui/ui/app.js"],
)  # fmt: skip
def test_nothing_else_is_there(locked, path):
    answer = locked.http.get(path)
    assert answer.status_code == 404, answer.text
    assert "error" in answer.json()
    assert "import" not in answer.text


@pytest.mark.parametrize(
    "path", ["/ui", "/uix", "//", "/kv/live", "/ui/../guards.py", "/ui%2f../kv/stats", "/UI/"]
)
def test_the_key_is_still_asked_for_beside_them(locked, path):
    answer = locked.http.get(locked.url + path)
    assert answer.status_code in {401, 404}
    if answer.status_code == 404:  # below /ui/, where there is no such file
        assert "no such file" in answer.text


def test_only_reading(locked):
    for path in ("/", "/ui/app.js"):
        assert locked.http.post(path, json={}).status_code == 405
        head = locked.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(locked.http.get(path).content)


def test_what_is_known_is_not_sent_again(locked):
    first = locked.http.get("/ui/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = locked.http.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = locked.http.get("/ui/app.js", headers={"if-none-match": '"other"'})
    assert other.content == first.content


def test_other_host_names_get_no_page(locked):
    answer = locked.http.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 400


def test_it_is_no_part_of_the_api_document(locked):
    paths = locked.app.openapi()["paths"]
    assert not any(path == "/" or path.startswith("/ui") for path in paths)


def test_what_is_asked_every_few_seconds_does_not_fill_the_log(locked, caplog):
    caplog.set_level("DEBUG", logger="kvkeep.access")
    locked.http.get("/kv/live", headers={"authorization": f"Bearer {KEY}"})
    locked.http.get("/health")
    locked.http.post("/health")
    locked.http.get("/")

    def said():
        """(level, method, path, status) of each request."""
        return [
            (r.levelname, *r.getMessage().split()[:3])
            for r in caplog.records if r.name == "kvkeep.access"
        ]  # fmt: skip

    eventually(lambda: len(said()) == 4)  # a line follows its answer
    assert sorted(said()) == [
        ("DEBUG", "GET", "/health", "200"),
        ("DEBUG", "GET", "/kv/live", "200"),
        ("INFO", "GET", "/", "200"),
        ("INFO", "POST", "/health", "405"),
    ]


# --- what they are made of -------------------------------------------------------------------


def test_all_that_the_page_names_is_there():
    page = (FOLDER / "index.html").read_text("utf-8")
    named = re.findall(r'(?:src|href)="ui/([^"]+)"', page)
    assert len(named) >= 5
    assert set(named) <= set(NAMES)
    for name in OURS:
        for module in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text("utf-8")):
            assert module in NAMES, f"{name} imports {module}"


def test_every_script_is_used():
    said = "".join((FOLDER / name).read_text("utf-8") for name in OURS)
    for name in OURS:
        assert name == "index.html" or re.search(rf"[\"/]{re.escape(name)}\"", said), name


@pytest.mark.parametrize("name", OURS)
def test_no_text_becomes_markup(name):
    """What the policy in the headers forbids is not even tried."""
    text = (FOLDER / name).read_text("utf-8")
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                      "new Function", "DOMParser", "javascript:", "createContextualFragment",
                      "srcdoc", "setAttribute(\"style\"", " style=", " onclick=", "http://",
                      "https://"):  # fmt: skip
        found = text.replace("http://www.w3.org/2000/svg", "")
        assert forbidden not in found, forbidden


def test_texts_are_called_as_the_contract_calls_them():
    """Every reason that can be told has words of its own."""
    explain = pytest.importorskip("kvkeep.observe.explain")
    words = (FOLDER / "words.js").read_text("utf-8")
    listed = words[words.index("REASONS = {") :].partition("};")[0]
    assert set(re.findall(r"^  ([a-z]\w*):", listed, re.MULTILINE)) == set(explain.REASONS)


def test_its_licence_goes_with_the_wheel():
    assert '"src/kvkeep/vendor/uplot/LICENSE"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert "MIT" in FILES["vendor/LICENSE"].read_text("utf-8")
