"""What is in a wheel and in a source distribution, and what an index shows of them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from dist_checks.bare import light_extras, pythons  # noqa: E402 - beside dist.py
from dist_checks.contents import (  # noqa: E402
    description,
    faults_of,
    listed,
    metadata,
    sdist_files,
    wheel_files,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NEEDED = ("build", "hatchling", "hatch_fancy_pypi_readme")
pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in NEEDED),
        reason="a release is built with what requirements-dev.txt names",
    ),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the source distribution, and that; by the tools that are installed."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[0]


def test_both_have_exactly_what_belongs_to_them(built: tuple[Path, Path]) -> None:
    assert faults_of(*built, ROOT, listed(ROOT, new=True)) == []


@pytest.mark.parametrize(
    "name",
    [
        "kvkeep/py.typed",
        "kvkeep/serve/models/tiny/model.safetensors",
        "kvkeep/serve/models/tiny/tokenizer.json",
        "kvkeep/serve/server/ui/index.html",
        "kvkeep/serve/server/ui/app.js",
        "kvkeep/vendor/uplot/uPlot.iife.min.js",
        "kvkeep/bench/replay/report/page/page.html",
        "kvkeep-{}.dist-info/licenses/LICENSE",
        "kvkeep-{}.dist-info/licenses/src/kvkeep/vendor/uplot/LICENSE",
        "kvkeep-{}.dist-info/licenses/src/kvkeep/serve/models/tiny/NOTICE",
    ],
)
def test_a_wheel_has_what_is_no_python(wheel: Path, name: str) -> None:
    assert wheel_files(wheel)[name.format(PROJECT["version"])] > 0 or name.endswith("py.typed")


def test_a_wheel_has_no_tests_and_no_caches(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_files(wheel)}
    assert tops == {"kvkeep", f"kvkeep-{PROJECT['version']}.dist-info"}
    assert not [name for name in wheel_files(wheel) if "__pycache__" in name or "test_" in name]


def test_a_source_distribution_has_what_its_tests_need(built: tuple[Path, Path]) -> None:
    files = sdist_files(built[1])
    assert {"Makefile", "constraints.txt", "requirements-dev.txt", "CONTRIBUTING.md"} <= files
    assert {"tests/conftest.py", "tests_vllm/conftest.py", "tests_sglang/conftest.py"} <= files


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    version = PROJECT["version"]
    assert metadata(wheel)["Version"] == version
    init = (ROOT / "src" / "kvkeep" / "__init__.py").read_text("utf-8")
    assert f'__version__ = "{version}"' in init
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_an_index_shows_addresses_and_licences(wheel: Path) -> None:
    said = metadata(wheel)
    addresses = [one.split(", ")[1] for one in said.get_all("Project-URL", [])]
    assert addresses == list(PROJECT["urls"].values())
    assert all(one.startswith("https://github.com/kvkeep/kvkeep") for one in addresses)
    assert said["License-Expression"] == "Apache-2.0 AND MIT AND PSF-2.0"
    assert set(said.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()


def test_an_index_shows_the_readme_with_links_of_this_version(wheel: Path) -> None:
    shown = description(wheel)
    tag = f"v{PROJECT['version']}"
    assert "\npip install 'kvkeep[all]' " in shown
    assert f"](https://github.com/kvkeep/kvkeep/blob/{tag}/docs/vllm.md)" in shown
    pictures = (ROOT / "README.md").read_text("utf-8").count("![")
    raw = f"](https://raw.githubusercontent.com/kvkeep/kvkeep/{tag}/docs/"
    assert shown.count(raw) == pictures > 0


def test_extras_without_torch_are_told_apart(wheel: Path) -> None:
    """They are installed for every Python of a machine."""
    light = light_extras(wheel)
    assert {"cli", "encryption", "router", "testing"} <= light
    assert not light & {"torch", "transformers", "store", "objects", "server", "all"}


def test_this_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    minor = sys.version_info.minor
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert pythons()[minor].name in ("python", f"python3.{minor}")


def changed(wheel: Path, folder: Path, change: dict[str, bytes | None]) -> Path:
    """A copy of ``wheel`` with other files; None leaves one out."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            if name not in change:
                new.writestr(name, old.read(name))
        for name, content in change.items():
            if content is not None:
                new.writestr(name, content)
    return copy


def planted(wheel: Path) -> Iterator[tuple[dict[str, bytes | None], str]]:
    """Faulty changes of a wheel, and what is said of each."""
    info = f"kvkeep-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel) as opened:
        about = opened.read(f"{info}/METADATA")
    yield {"kvkeep/py.typed": None}, "wheel: kvkeep/py.typed is missing"
    licence = f"{info}/licenses/src/kvkeep/vendor/uplot/LICENSE"
    yield {licence: None}, f"wheel: {licence} is missing"
    yield {"tests/x.py": b""}, "wheel: tests/x.py is too much, or not in Git"
    cached = "kvkeep/__pycache__/cli.cpython-311.pyc"
    yield {cached: b""}, f"wheel: {cached} is too much, or not in Git"
    yield (
        {f"{info}/METADATA": about + b"[here](docs/store.md)"},
        "index page: the link ](docs/store.md) leads nowhere outside the repository",
    )
    yield (
        {f"{info}/METADATA": about + b"in this folder"},
        "index page: 'in this folder' is about a checkout",
    )
    old = b"https://github.com/kvkeep/kvkeep/blob/v0.0.9/x"
    yield (
        {f"{info}/METADATA": about + old},
        f"index page: links lead to v0.0.9, the version is {PROJECT['version']}",
    )


def test_a_fault_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    files = listed(ROOT, new=True)
    for change, said in planted(wheel):
        assert faults_of(changed(wheel, tmp_path, change), sdist, ROOT, files) == [said]


def test_a_vendored_part_without_its_licence_is_found(built: tuple[Path, Path]) -> None:
    files = [*listed(ROOT, new=True), "src/kvkeep/vendor/other/code.js"]
    assert "wheel: no file of license-files is about src/kvkeep/vendor/other" in faults_of(
        *built, ROOT, files
    )
