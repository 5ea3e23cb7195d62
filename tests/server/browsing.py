"""A server's page in a real browser: opening it, and what tests ask of it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from real_server import eventually

KEY = "a-long-secret"
WORDS = "You are a careful assistant who knows the standard library of Python by heart. "
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "dark", "viewport": {"width": 360, "height": 740},
              "is_mobile": True, "has_touch": True},
}  # fmt: skip
HOSTILE = (
    "<script>window.taken=1</script><img src=x onerror=window.taken=2> \x1b[31m\u202egnp.exe "
    '"><svg onload=window.taken=3> {{7*7}} \u2066\u2069 '
)


@pytest.fixture
def opened(browser):
    """Opens a server's page. At its end nothing may have been said on its console that was not
    expected, and nothing asked of anybody else."""

    @contextmanager
    def open_page(server, key=None, expected=(), **settings):
        said, asked = [], []
        settings = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce",
                    **settings}  # fmt: skip
        context = browser.new_context(**settings)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.asked = asked
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('kvkeep-key', {key!r})")
        page.goto(server.url)
        yield page
        context.close()
        assert [one for one in said if not any(part in one for part in expected)] == []
        assert all(one.startswith(server.url) for one in asked)

    return open_page


def complete(server, prompt, session=None, **more):
    """Ask for one token; the answer's id."""
    if session is not None:
        more["kvkeep"] = {"session": session}
    headers = {} if server.settings.api_key is None else {"authorization": f"Bearer {KEY}"}
    body = {"prompt": prompt, "max_tokens": 1, **more}
    answer = server.http.post("/v1/completions", json=body, headers=headers)
    return answer.raise_for_status().json()["id"]


def until(page, expression, arg=None):
    """Wait until it holds; asked from outside, since the page's policy forbids `eval`."""
    eventually(lambda: page.evaluate(expression, arg) or page.wait_for_timeout(40), 10.0)


def live(page):
    until(page, "document.getElementById('state').dataset.state === 'live'")


def see(page, selector):
    """Scroll there, so that it is asked for and drawn."""
    place = page.locator(selector).first
    place.wait_for()
    place.scroll_into_view_if_needed()
    return place


def boxes(page):
    see(page, "#kept")
    page.locator("#picture [role=treeitem]").first.wait_for()
    return page.locator("#picture [role=treeitem]")


def chosen_run(page):
    """Click on the first run below a namespace, and see its details."""
    boxes(page)
    page.locator("#picture [role=treeitem][aria-level='2']:not(.several)").first.click()
    page.locator("#details dl").wait_for()


def plain(text):
    return text.replace("\u00a0", " ")
