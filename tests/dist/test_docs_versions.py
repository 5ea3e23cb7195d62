"""Built as one of several versions, the site offers the others; alone it does not ask for them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

config = pytest.importorskip("mkdocs.config", reason="see requirements-dev.txt")

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import docs_hooks  # noqa: E402 - beside mkdocs.yml, and no package of ours


@pytest.mark.parametrize("several", [False, True])
def test_versions_are_offered_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    monkeypatch.delenv("MIKE_DOCS_VERSION", raising=False)
    if several:
        monkeypatch.setenv("MIKE_DOCS_VERSION", '{"version": "0.1"}')
    site = config.load_config(str(ROOT / "mkdocs.yml"))
    docs_hooks.on_config(site)
    assert site.extra.get("version", {}).get("provider") == ("mike" if several else None)


def test_the_version_is_that_of_the_package() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("$$", "$")
    [command] = re.findall(r"version=\$\((sed .*? pyproject\.toml)\)", makefile)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert done.stdout.decode().strip() == ".".join(project["version"].split(".")[:2])
