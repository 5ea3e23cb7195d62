"""The dashboard in a real browser: who may change what, how often it asks, hostile text."""

from __future__ import annotations

import pytest
from browsing import HOSTILE, KEY, WORDS, boxes, complete, live, see, until
from real_server import eventually

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def locked(start_server):
    with start_server(api_key=KEY) as server:
        yield server


# --- who may ---------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_kept_in_this_tab(locked, opened):
    with opened(locked, expected=["401"]) as page:
        field = page.get_by_role("textbox", name="API key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("rejected this API key").wait_for()
        field.fill(KEY)
        page.keyboard.press("Enter")
        live(page)
        assert page.locator("#notice").is_hidden()
        kept = page.evaluate("[sessionStorage.getItem('kvkeep-key'), JSON.stringify(localStorage),"
                             " document.cookie, location.href]")  # fmt: skip
        assert kept[0] == KEY
        assert KEY not in "".join(kept[1:])
        assert not any(KEY in one for one in page.asked)
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_text("needs its API key").wait_for()
        assert page.evaluate("sessionStorage.getItem('kvkeep-key')") is None


# --- how often -------------------------------------------------------------------------------


def test_a_page_that_is_not_seen_asks_nothing(server, opened):
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with opened(server) as page:
        live(page)
        page.evaluate(hide, True)
        page.wait_for_timeout(300)  # what was on its way
        before = len(page.asked)
        page.wait_for_timeout(1800)
        assert len(page.asked) == before
        page.evaluate(hide, False)
        eventually(lambda: page.wait_for_timeout(50) or len(page.asked) > before)


def test_what_is_out_of_sight_is_not_asked_for(server, opened):
    with opened(server, viewport={"width": 1280, "height": 300}) as page:
        live(page)
        assert not any("/kv/summary" in one for one in page.asked)
        with page.expect_request("**/kv/summary*"):
            see(page, "#causes")


def test_pausing(server, opened):
    with opened(server) as page:
        live(page)
        page.get_by_role("button", name="Pause polling the server").click()
        page.wait_for_timeout(300)
        before = len(page.asked)
        page.wait_for_timeout(1500)
        assert len(page.asked) == before
        page.get_by_role("button", name="Resume polling the server").click()
        live(page)


def test_a_server_that_does_not_answer(server, opened):
    with opened(server, expected=["ERR_FAILED", "net::"]) as page:
        live(page)
        page.route("**/kv/**", lambda route: route.abort())
        page.get_by_text("The server does not answer. Trying again in").wait_for()
        assert page.locator("#state-text").inner_text() == "No answer"
        asked = len([one for one in page.asked if "/kv/live" in one])
        page.wait_for_timeout(3200)  # it waits longer each time
        assert len([one for one in page.asked if "/kv/live" in one]) <= asked + 1
        page.unroute("**/kv/**")
        page.get_by_role("button", name="Try now").click()
        live(page)
        assert page.locator("#notice").is_hidden()


def test_what_is_switched_off_is_said(start_server, opened):
    with start_server(text=False) as server:
        complete(server, WORDS * 4)
        with opened(server) as page:
            live(page)
            boxes(page)
            assert "careful" not in page.locator("#picture").inner_text()


# --- hostile ---------------------------------------------------------------------------------


def test_hostile_text_is_text(server, opened):
    salt = HOSTILE[:120]
    complete(server, HOSTILE * 4)
    complete(server, (HOSTILE + " again ") * 4, cache_salt=salt, session=HOSTILE[:60])
    with opened(server) as page:
        live(page)
        boxes(page)
        until(page, "document.getElementById('picture').textContent.includes('<script>')")
        page.locator("#picture .box:not(:has(.space))").first.click()
        page.locator("#details dl").wait_for()
        see(page, "#requests")
        see(page, ".request").click()
        page.locator("dialog .spans").wait_for()
        page.keyboard.press("Escape")
        for place in ("#causes", "#tenants"):
            see(page, place)
        page.locator("#tenants-table").get_by_text("<script>").first.wait_for()
        whole = page.evaluate("document.body.textContent")
        assert page.evaluate("window.taken") is None
        assert page.locator("main img, main script, main svg [onload]").count() == 0
    assert "\\u202e" in whole
    assert not {"\u202e", "\u2066", "\x1b"} & set(whole)


def test_no_script_runs_that_is_put_in_later(server, opened):
    with opened(server, expected=["Content Security Policy", "TrustedScript", "Trusted"]) as page:
        live(page)
        page.evaluate("""() => {
          const script = document.createElement("script");
          try { script.textContent = "window.taken = 2"; } catch { return; }
          document.body.append(script);
        }""")
        broke = page.evaluate("""() => {
          try { document.body.innerHTML = "<img src=x onerror=alert(1)>"; } catch { return true; }
        }""")
        assert broke
        assert page.evaluate("window.taken") is None
