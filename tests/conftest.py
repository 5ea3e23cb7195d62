"""What tests of several rooms use."""

from __future__ import annotations

import gc
import os
import shutil

import pytest
from hypothesis import settings

from skip_counts import pytest_terminal_summary  # noqa: F401 - a hook

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked ``cuda`` needs a device; `scripts/gpu_proof.py` runs all of them."""
    if item.get_closest_marker("cuda") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


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


@pytest.fixture
def load_first(monkeypatch):
    """For tests of what is loaded: engines wait for all of it, up to their ``load_timeout``."""
    from kvkeep.serve.engine.offload import offload
    from waiting_loads import load_all, whole_timeout

    monkeypatch.setattr(offload, "choose_load", load_all)
    monkeypatch.setattr(offload, "lookup_patience_s", whole_timeout)
