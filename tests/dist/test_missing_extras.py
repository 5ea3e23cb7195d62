"""Without its extra, each part says once, in one line, what to install, and that suffices."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest
from environments import EXTRAS, ROOT, brought_by, make, packages, said_in
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Callable

ZSTD = b"\x28\xb5\x2f\xfd"  # how a file in zstd begins


def command(*arguments: str) -> str:
    """A program that runs kvkeep, and raises what it says unless it ends well."""
    return (
        "import contextlib, io\n"
        "from kvkeep.cli import main\n"
        "said = io.StringIO()\n"
        "with contextlib.redirect_stderr(said):\n"
        f"    code = main({list(arguments)!r})\n"
        "if code: raise SystemExit(said.getvalue().strip())\n"
    )


def opened(tier: str) -> str:
    return f"from kvkeep.store import BlockStore\nBlockStore('b', tiers=[{tier!r}]).close()"


# What a user does first with each part, and the extras that bring all it needs.
PARTS: dict[str, tuple[str, str]] = {
    "KVStore": ("from kvkeep.store import KVStore", "store"),
    "model_identity": ("from kvkeep.store import model_identity", "store"),
    "kvkeep.store.kv": ("import kvkeep.store.kv", "store"),
    "kvkeep.store.identity": ("import kvkeep.store.identity", "store"),
    "BlockStore": (opened("memory://1MiB"), "store"),
    "BlockStore, lossless": (opened("memory://1MiB?codec=lossless"), "store"),
    "BlockStore, encrypted": (opened("memory://1MiB?encrypt={KEY}"), "store,encryption"),
    "BlockStore, objects": (opened("s3://bucket/prefix?region=nowhere"), "objects"),
    "tiers, checked": (
        "from kvkeep.store.tiers import check_tiers\n"
        "check_tiers(['memory://1MiB', 's3://bucket?size=1MiB&encrypt={KEY}'])",
        "objects,encryption",
    ),
    "a lossy codec": (
        "from kvkeep.store.codecs import BlockShape, make_codec\n"
        "make_codec('int8', BlockShape('float16', 'NHD', ((2, 64),)))",
        "store",
    ),
    "tensors of pages": ("import kvkeep.core.pages.tensors", "torch"),
    "tensors of windows and states": ("import kvkeep.core.groups.tensors", "torch"),
    "engine": ("import kvkeep.serve.engine", "transformers"),
    "server": ("import kvkeep.serve.server", "server"),
    "kvkeep.serve.http": ("import kvkeep.serve.http", "server"),
    "KV events": ("import kvkeep.serve.kv_events", "events"),
    "router": ("import kvkeep.serve.router.proxy", "router"),
    "KeptModel": ("from kvkeep.integrations.transformers import KeptModel", "transformers"),
    "BackendTests": ("from kvkeep.testing import BackendTests", "testing"),
    "PolicyTests": ("from kvkeep.testing import PolicyTests", "testing"),
    "a picture of a tree": (
        "from kvkeep.core.prefix import render\nrender.draw('', [])",
        "cli",
    ),
    "spans": (
        "import os\nos.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:9'\n"
        "from kvkeep.observe.telemetry import start\nstart(always=True)",
        "otel",
    ),
    "a trace in zstd": (
        f"import pathlib, tempfile\nfrom kvkeep.bench.traces.fields import opened\n"
        "with tempfile.NamedTemporaryFile() as file:\n"
        f"    file.write({ZSTD!r}); file.flush()\n"
        "    with opened(pathlib.Path(file.name)): pass",
        "traces",
    ),
}
# The commands that need more than NumPy; what stops them afterwards is a wrong argument.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": (command("serve", "--model", "/nowhere"), "server"),
    "demo": (command("demo", "--model", "/nowhere"), "server"),
    "tree": (command("tree", "--model", "/nowhere"), "transformers,cli"),
    "route": (command("route"), "router"),
}
CASES = {**PARTS, **{f"kvkeep {name}": case for name, case in COMMANDS.items()}}
RAISED = "kvkeep.core.errors.MissingExtra: "
NAMED = r"\w+ is needed here; install it with: pip install 'kvkeep\[{}\]'"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[str]], list[str | None]]:
    """Tells what programs raise in an environment with extras."""

    def told(extras: str, programs: list[str]) -> list[str | None]:
        folder = tmp_path_factory.mktemp("environment")
        return said_in(make(folder, extras.split(",") if extras else []), programs)

    return told


@pytest.fixture(scope="module")
def bare(said: Callable[[str, list[str]], list[str | None]]) -> dict[str, str | None]:
    """What each part says where nothing but NumPy is installed."""
    messages = said("", [program for program, _ in CASES.values()])
    return dict(zip(CASES, messages, strict=True))


@pytest.mark.parametrize("part", CASES)
def test_without_its_extra_a_part_names_it_once(part: str, bare: dict[str, str | None]) -> None:
    _, extra = CASES[part]
    message = bare[part]
    assert message is not None, "it needs no extra"
    kind = "SystemExit: kvkeep: error: " if part.startswith("kvkeep ") else ""
    assert re.fullmatch(kind + NAMED.format(extra), message.removeprefix(RAISED)), message


@pytest.mark.parametrize("extra", sorted({extra for _, extra in CASES.values()}))
def test_the_extra_that_was_named_brings_all_that_is_needed(
    extra: str, said: Callable[[str, list[str]], list[str | None]]
) -> None:
    parts = [part for part, (_, its) in CASES.items() if its == extra]
    messages = said(extra, [CASES[part][0] for part in parts])
    for part, message in zip(parts, messages, strict=True):
        if part in PARTS:
            assert message is None, f"{part}: {message}"
        else:  # it came as far as its arguments
            assert message is None or message.startswith("SystemExit: kvkeep: error: "), message
            assert "is needed here" not in (message or ""), f"{part}: {message}"


def test_every_extra_is_named_by_some_part() -> None:
    named = {extra for _, extras in CASES.values() for extra in extras.split(",")}
    assert named == EXTRAS.keys() - {"all"}


def test_the_page_of_extras_has_each_with_what_it_brings() -> None:
    page = (ROOT / "docs" / "reference" / "extras.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*?) ?\|$", page, re.MULTILINE))
    assert rows.keys() == EXTRAS.keys()
    for extra, brings in rows.items():
        if extra != "all":
            ours = {name for text in EXTRAS[extra] for name in Requirement(text).extras}
            assert set(re.findall(r"`(\w+)`", brings)) == ours, extra


@pytest.mark.parametrize(
    ("statement", "package", "engine"),
    [
        ("from kvkeep.integrations.vllm import KVKeepConnector", "vllm", "vLLM"),
        ("from kvkeep.integrations.sglang import KVKeepStorage", "sglang", "SGLang"),
    ],
)
def test_without_its_engine_an_adapter_names_it(
    statement: str, package: str, engine: str, said: Callable[[str, list[str]], list[str | None]]
) -> None:
    [message] = said("", [statement])
    assert message == (
        f"{RAISED}{package} is needed here; kvkeep runs inside {engine} here, "
        "which no extra installs"
    )


def required() -> list[tuple[str, str, str]]:
    """Every `require` with two texts in the source: where, the module and the extras."""
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        text = file.read_text("utf-8")
        if "require(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(
                    ast.Name("require"), [ast.Constant(str(module)), ast.Constant(str(extras))]
                ):
                    found.append((f"{file.name}:{node.lineno}", module, extras))
    return found


def test_every_extra_that_is_named_exists_and_brings_the_package() -> None:
    calls = required()
    assert len(calls) > 50
    brought = {extras: brought_by(extras.split(",")) for _, _, extras in calls}
    for where, module, extras in calls:
        package = module.partition(".")[0]
        if package != "kvkeep":
            found = any({package, f"{package}.py"} & packages(name) for name in brought[extras])
            assert found, f"{where}: {extras} brings no {package}"
