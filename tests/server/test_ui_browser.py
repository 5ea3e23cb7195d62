"""The dashboard in a real browser, on a real server: seen, typed into, listened to, attacked."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager

import pytest
from real_server import eventually

pytestmark = pytest.mark.model

KEY = "a-long-secret"
WORDS = "You are a careful assistant who knows the standard library of Python by heart. "
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "dark", "viewport": {"width": 360, "height": 740},
              "is_mobile": True, "has_touch": True},
}  # fmt: skip
# What holds more than it is wide, and would be scrolled or cut.
TOO_WIDE = """() => [...document.querySelectorAll("main > *, .card, .requests, .causes")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.id || one.className)"""
HOSTILE = (
    "<script>window.taken=1</script><img src=x onerror=window.taken=2> \x1b[31m\u202egnp.exe "
    '"><svg onload=window.taken=3> {{7*7}} \u2066\u2069 '
)


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


@pytest.fixture(scope="module")
def locked(start_server):
    with start_server(api_key=KEY) as server:
        yield server


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


def pinned(server):
    headers = {"authorization": f"Bearer {KEY}"}
    nodes = server.http.get("/kv/map", headers=headers).json()["nodes"]
    return sum(one["pins"] for one in nodes)


def chosen_run(page):
    """Click on the first run below a namespace, and see its details."""
    boxes(page)
    page.locator("#picture [role=treeitem][aria-level='2']:not(.several)").first.click()
    page.locator("#details dl").wait_for()


def plain(text):
    return text.replace("\u00a0", " ")


# --- what is seen ----------------------------------------------------------------------------


def test_it_says_what_it_is(server, opened):
    complete(server, WORDS)
    with opened(server) as page:
        live(page)
        assert page.locator("#model").inner_text().startswith("kvkeep-tiny · lru · ")
        assert "request" in page.locator("#running .note").inner_text()
        assert "of running requests" in page.locator("#pool .key").inner_text()
        assert see(page, "#tiers-said").inner_text().startswith("This server keeps KV in its pool")
        assert "--no-what-if" in page.locator("#whatif-said").inner_text()
        assert see(page, "#tenants-table").get_by_text("(no salt)").is_visible()


def test_live_values_move_while_a_load_runs(server, opened):
    with opened(server) as page:
        live(page)
        count = "document.querySelector('#running .note').textContent"
        line = "document.getElementById('history').querySelector('canvas')?.toDataURL()"
        counted, drawn = page.evaluate(count), page.evaluate(line)
        load = threading.Thread(
            target=lambda: [complete(server, f"{WORDS * 3} {number}") for number in range(8)]
        )
        load.start()
        until(page, f"(was) => {count} !== was", arg=counted)
        until(page, f"(was) => {line} !== was", arg=drawn)
        until(page, "document.querySelector('#rate .value').textContent.includes('%')")
        load.join()


def test_what_if_is_drawn_where_it_is_watched(start_server, opened):
    with start_server(what_if=1.0) as server:
        for number in range(4):
            complete(server, f"{WORDS * 8} {number}")
            complete(server, f"{WORDS * 8} {number} and more")
        with opened(server) as page:
            live(page)
            page.locator("#whatif canvas").wait_for()
            assert page.locator("#whatif-points li.now").inner_text().startswith("1×")


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_scrolls_sideways(server, opened, look, tmp_path):
    complete(server, WORDS * 2 + "W" * 400, cache_salt="x" * 200)
    with opened(server, **LOOKS[look]) as page:
        live(page)
        for place in ("#history", "#kept", "#causes", "#requests", "#tiers", "#tenants"):
            see(page, place)
        boxes(page).first.click()
        page.locator("#details dl").wait_for()
        # Not innerWidth: a phone's grows with what does not fit.
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= page.viewport_size["width"]
        assert page.evaluate(TOO_WIDE) == []
        page.screenshot(path=tmp_path / f"{look}.png", full_page=True)
        see(page, ".request").click()
        page.locator("dialog .spans").wait_for()
        assert page.evaluate(
            "(d => d.scrollWidth <= d.clientWidth)(document.querySelector('dialog'))"
        )


def test_the_switch_turns_everything_and_stays(server, opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(server, color_scheme="light") as page:
        live(page)
        light = page.evaluate(ground)
        page.get_by_role("button", name="Show it dark").click()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        assert page.evaluate(ground) == dark
        page.get_by_role("button", name="Show it light").click()
        assert page.evaluate(ground) == light
    with opened(server, color_scheme="dark") as page:
        assert page.evaluate(ground) == dark


# --- what is kept ----------------------------------------------------------------------------


def test_search_finds_a_prefix(server, opened):
    complete(server, "Zebras gallop over the quiet meadow while seven owls keep watch. " * 3)
    with opened(server) as page:
        boxes(page)
        page.get_by_label("Search for").fill("seven owls")
        page.keyboard.press("Enter")
        found = page.locator("#found-list button")
        found.first.wait_for()
        assert "place" in page.locator("#found-said").inner_text()
        found.first.click()
        page.locator("#details .code").first.wait_for()
        until(page, "document.querySelector('#details-body .code').textContent.includes('owls')")
        page.get_by_label("Search for").fill("nobody ever wrote this")
        page.keyboard.press("Enter")
        page.get_by_text("Nothing that is kept has this").wait_for()


def test_search_finds_tokens(server, opened):
    prompt = "Marmots whistle when an eagle passes, and vanish between the stones. " * 3
    complete(server, prompt)
    tokens = server.engine.tokenizer.encode(prompt)[4:10]
    with opened(server) as page:
        boxes(page)
        page.get_by_label("Search by").select_option("tokens")
        page.get_by_label("Search for").fill(", ".join(str(one) for one in tokens))
        page.get_by_role("button", name="Search", exact=True).click()
        page.locator("#found-list button").first.wait_for()


def test_zooming_and_the_way_back(server, opened):
    for end in ("one", "two"):
        complete(server, WORDS * 4 + f"{end} " * 40)
    with opened(server) as page:
        all_boxes = boxes(page)
        until(page, "document.querySelectorAll('#picture [role=treeitem]').length > 2")
        before = all_boxes.count()
        inner = page.locator("#picture [role=treeitem][aria-level='2']").first
        name = inner.get_attribute("aria-label").partition(":")[0]
        inner.click()
        until(
            page,
            "document.querySelectorAll('#crumbs li').length >= 3"
            " || !document.getElementById('details').hidden",
        )
        crumbs = page.locator("#crumbs button")
        assert crumbs.first.inner_text() == "Everything"
        crumbs.first.click()
        until(
            page,
            "(was) => document.querySelectorAll('#picture [role=treeitem]').length >= was",
            arg=before,
        )
        assert name


def test_by_keyboard_alone(server, opened):
    complete(server, WORDS * 6)
    with opened(server) as page:
        boxes(page)
        page.evaluate("scrollTo(0, 0)")
        inside = "document.activeElement.closest('#picture') !== null"
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(inside):
                break
        assert page.evaluate(inside), "Tab does not reach the picture"
        level = "document.activeElement.getAttribute('aria-level')"
        assert page.evaluate(level) == "1"
        page.keyboard.press("ArrowDown")
        assert page.evaluate(level) == "2"
        at = page.evaluate("document.activeElement.dataset.key")
        page.keyboard.press(" ")
        details = page.locator("#details")
        details.wait_for()
        page.locator("#details dl").wait_for()
        page.keyboard.press("Escape")
        assert details.is_hidden()
        assert page.evaluate("document.activeElement.dataset.key") == at
        page.keyboard.press("ArrowUp")
        assert page.evaluate(level) == "1"
        page.keyboard.press("Enter")  # looks at it alone
        until(page, "document.querySelectorAll('#crumbs li').length === 2")
        assert page.evaluate(inside), "the focus is lost on the way down"
        page.keyboard.press("Backspace")
        until(page, "document.querySelectorAll('#crumbs li').length === 1")
        outlines = "getComputedStyle(document.activeElement).boxShadow"
        assert page.evaluate(outlines) != "none", "the focus is not seen"


def test_the_focus_stays_while_the_tree_changes(server, opened):
    complete(server, WORDS * 6)
    with opened(server) as page:
        boxes(page)
        page.locator("#picture [role=treeitem][aria-level='2']:not(.several)").first.focus()
        at = "document.activeElement.dataset.key"
        before = page.evaluate(at)
        complete(server, "A new tenant is larger than all before it. " * 40, cache_salt="larger")
        until(page, "document.getElementById('picture').textContent.includes('tenant larger')")
        assert page.evaluate(at) == before


def test_the_list_says_the_same(server, opened):
    complete(server, WORDS * 6)
    with opened(server) as page:
        picture = boxes(page)
        named = {one.partition(":")[0] for one in picture.evaluate_all(
            "(all) => all.map((one) => one.getAttribute('aria-label'))")}  # fmt: skip
        page.get_by_role("button", name="List").click()
        lines = page.locator("#list [role=treeitem]")
        lines.first.focus()
        assert lines.first.get_attribute("aria-expanded") == "true"
        page.keyboard.press("ArrowLeft")
        assert lines.first.get_attribute("aria-expanded") == "false"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        second = page.evaluate("document.activeElement.querySelector('.what').textContent")
        assert second in named
        page.keyboard.press("Enter")
        page.locator("#details dl").wait_for()
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.closest('#list') !== null")


# --- why -------------------------------------------------------------------------------------


def test_an_explanation_opens_and_names_the_reason(server, opened):
    rest = " Remember it well, and answer every question about time as exactly as you can. " * 3
    complete(server, "The clock on the wall says it is 10:00 now." + rest)
    asked = complete(server, "The clock on the wall says it is 17:45 now." + rest)
    with opened(server) as page:
        see(page, "#requests")
        first = page.locator(".request").first
        first.wait_for()
        first.click()
        dialog = page.locator("dialog")
        dialog.locator(".spans").wait_for()
        assert asked in dialog.locator("h2").inner_text()
        assert dialog.locator(".spans b").get_by_text("differs", exact=True).count() == 1
        marked = dialog.locator("mark").all_inner_texts()
        assert marked[0] != marked[1]
        samples = dialog.locator(".sample .code").all_inner_texts()
        assert "17:45" in samples[0]
        assert "10:00" in samples[1]
        spans = [plain(one) for one in dialog.locator(".spans li").all_inner_texts()]
        assert any(one.startswith("from the pool") for one in spans)
        page.keyboard.press("Escape")
        assert dialog.is_hidden()
        assert page.evaluate("document.activeElement.classList.contains('request')")
        see(page, "#causes")
        page.locator("#causes-list li").first.wait_for()
        page.locator("#causes-list").get_by_role("button").first.click()
        dialog.locator(".spans").wait_for()


def test_a_prompt_can_be_explained_before_it_is_asked(server, opened):
    complete(server, WORDS * 5)
    before = server.stats()["cache"]["pages_cached"]
    with opened(server) as page:
        see(page, "#requests")
        page.get_by_role("button", name="Explain a prompt…").click()
        page.get_by_label("Prompt", exact=True).fill(WORDS * 5 + "What now?")
        page.get_by_role("button", name="Explain", exact=True).click()
        page.get_by_text("If it were asked now").wait_for()
        assert page.locator("dialog .spans li").first.inner_text().startswith("from the pool")
    assert server.stats()["cache"]["pages_cached"] == before


# --- who may ---------------------------------------------------------------------------------


def test_pinning_needs_a_server_with_a_key(server, opened):
    complete(server, WORDS * 5)
    with opened(server) as page:
        live(page)
        chosen_run(page)
        page.locator("#details-why").wait_for()
        assert "started with an API key" in page.locator("#details-why").inner_text()
        for name in ("Pin…", "Unpin", "Evict…"):
            assert page.get_by_role("button", name=name).is_disabled()
        node = int(page.locator("#picture .chosen").get_attribute("data-key"))
    refused = server.http.post(f"/kv/map/{node}", json={"action": "pin", "ttl_s": 60})
    assert refused.status_code == 403


def test_with_the_key_it_is_pinned_and_evicted(locked, opened):
    complete(locked, "Only this prompt is pinned, and evicted after that, by hand. " * 4)
    with opened(locked, key=KEY) as page:
        live(page)
        chosen_run(page)
        page.get_by_role("button", name="Pin…").click()
        dialog = page.locator("dialog")
        assert "stay in the pool" in dialog.inner_text()
        dialog.get_by_role("button", name="Cancel").click()
        assert pinned(locked) == 0
        page.get_by_role("button", name="Pin…").click()
        dialog.get_by_label("For").select_option("3600")
        dialog.get_by_role("button", name="Pin", exact=True).click()
        page.get_by_text("The server pinned").wait_for()
        assert pinned(locked) > 0
        page.get_by_role("button", name="Unpin").click()
        page.get_by_text("The server let go of").wait_for()
        assert pinned(locked) == 0
        page.get_by_role("button", name="Evict…").click()
        dialog.get_by_role("button", name="Evict", exact=True).click()
        page.get_by_text("The server evicted").wait_for()
    assert locked.engine.cache.stats().pages_cached == 0


def test_the_key_is_asked_for_and_kept_in_this_tab(locked, opened):
    with opened(locked, expected=["401"]) as page:
        field = page.get_by_role("textbox", name="API key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("does not take this API key").wait_for()
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
        page.get_by_role("button", name="Stop asking the server").click()
        page.wait_for_timeout(300)
        before = len(page.asked)
        page.wait_for_timeout(1500)
        assert len(page.asked) == before
        page.get_by_role("button", name="Go on asking the server").click()
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
    with start_server(text=False, explain=False) as server:
        complete(server, WORDS * 4)
        with opened(server, expected=["404"]) as page:
            live(page)
            boxes(page)
            assert "careful" not in page.locator("#picture").inner_text()
            see(page, "#requests")
            until(
                page,
                "document.getElementById('requests-said').textContent.includes('--no-explain')",
            )
            see(page, "#causes")
            until(
                page, "document.getElementById('causes-said').textContent.includes('--no-explain')"
            )


# --- hostile ---------------------------------------------------------------------------------


def test_hostile_text_is_text(server, opened):
    salt = HOSTILE[:120]
    complete(server, HOSTILE * 4)
    complete(server, (HOSTILE + " again ") * 4, cache_salt=salt, session=HOSTILE[:60])
    with opened(server) as page:
        live(page)
        boxes(page)
        until(page, "document.getElementById('picture').textContent.includes('<script>')")
        page.get_by_label("Search for").fill("onerror")
        page.keyboard.press("Enter")
        page.locator("#found-list button").first.click()
        page.locator("#details dl").wait_for()
        see(page, ".request").click()
        page.locator("dialog .spans").wait_for()
        page.keyboard.press("Escape")
        for place in ("#causes", "#sessions", "#tenants"):
            see(page, place)
        page.locator("#tenants-table").get_by_text("<script>").first.wait_for()
        page.locator("#sessions-table").get_by_text("<script>").first.wait_for()
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


# --- for everybody ---------------------------------------------------------------------------


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(server, opened, look):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check(where):
        found = axe.run(page).response["violations"]
        grave = [(one["id"], [node["html"][:160] for node in one["nodes"][:3]])
                 for one in found if one["impact"] in {"serious", "critical"}]  # fmt: skip
        assert grave == [], where

    complete(server, WORDS * 3 + HOSTILE, session="chat-7")
    with opened(server, **LOOKS[look]) as page:
        live(page)
        for place in ("#causes", "#requests", "#sessions"):
            see(page, place)
            page.locator(f"{place}-list li, {place}-table tbody tr").first.wait_for()
        chosen_run(page)
        page.get_by_label("Search for").fill("careful")
        page.keyboard.press("Enter")
        page.locator("#found-list button").first.wait_for()
        check("page")
        if look == "light":
            page.get_by_role("button", name="List").click()
            check("list")
        see(page, ".request").click()
        page.locator("dialog .spans").wait_for()
        check("explanation")
        page.keyboard.press("Escape")
        page.locator("#key").click()
        check("key")
