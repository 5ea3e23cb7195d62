"""What tests of several rooms use."""

from __future__ import annotations

import gc
import os
import shutil

import pytest
from hypothesis import settings

# No test asks a public host: one authority is enough, and the usual hundreds take 30 ms to read for
# each client of httpx. Processes that tests start inherit it.
os.environ["SSL_CERT_FILE"] = os.path.join(os.path.dirname(__file__), "authority.pem")

# No test asserts how long anything takes: the machine may be busy.
settings.register_profile("kvkeep", deadline=None)
settings.load_profile("kvkeep")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported and collected stays: no later search for garbage goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    path = next((one for one in found if one), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    rights = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=rights)
        yield browser
        browser.close()


def wait_for_all(loads, compute_s, **_how):
    """As `kvkeep.core.cost.take_turns`; nothing is computed of a prompt that is being loaded."""
    from kvkeep.core.cost import PromptTurn

    turns = []
    for one in loads:
        prompt = one.prompt
        stop = at = prompt.computed
        if at >= prompt.loaded or one.over:
            stop = prompt.loaded if at < prompt.loaded < prompt.stop else prompt.tokens
        turns.append(PromptTurn(at, stop, 0.0, 0.0))
    return turns


@pytest.fixture
def load_first(monkeypatch):
    """For tests of what is loaded: engines wait for all of it, up to their ``load_timeout``."""
    from kvkeep.serve.engine.offload import overlaps

    monkeypatch.setattr(overlaps, "take_turns", wait_for_all)
