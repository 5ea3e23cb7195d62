"""What tests of several rooms use."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import settings

# No test asserts how long anything takes: the machine may be busy.
settings.register_profile("kvkeep", deadline=None)
settings.load_profile("kvkeep")


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
