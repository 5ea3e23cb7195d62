"""The dashboard in a real browser, on a real server: seen and explained, by everybody."""

from __future__ import annotations

import threading

import pytest
from browsing import (
    HOSTILE,
    LOOKS,
    WORDS,
    boxes,
    chosen_run,
    complete,
    live,
    plain,
    see,
    until,
)

pytestmark = pytest.mark.model


# --- what is seen ----------------------------------------------------------------------------


def test_it_says_what_it_is(server, opened):
    complete(server, WORDS)
    with opened(server) as page:
        live(page)
        assert page.locator("#model").inner_text().startswith("kvkeep-tiny · lru · ")
        assert "request" in page.locator("#running .note").inner_text()
        assert "of running requests" in page.locator("#pool .key").inner_text()
        assert see(page, "#tiers-said").inner_text().startswith("This server keeps KV in its pool")
        assert "No estimate" in page.locator("#whatif-said").inner_text()
        see(page, "#tenants")
        page.locator("#tenants-table").get_by_text("(no salt)").wait_for()


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


def test_the_switch_turns_everything_and_stays(server, opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(server, color_scheme="light") as page:
        live(page)
        light = page.evaluate(ground)
        page.get_by_role("button", name="Use the dark theme").click()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        assert page.evaluate(ground) == dark
        page.get_by_role("button", name="Use the light theme").click()
        assert page.evaluate(ground) == light
    with opened(server, color_scheme="dark") as page:
        assert page.evaluate(ground) == dark


# --- what is kept ----------------------------------------------------------------------------


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
        page.locator(".causes > li").first.wait_for()
        breaks = page.locator("#causes-change-list .samples").first
        assert "17:45" in breaks.locator(".code").first.inner_text()
        assert " an hour" in page.locator("#causes-change-list .quiet").first.inner_text()
        page.locator("#causes-change-list").get_by_role("button").first.click()
        dialog.locator(".spans").wait_for()


def test_a_prompt_can_be_explained_before_it_is_asked(server, opened):
    complete(server, WORDS * 5)
    before = server.stats()["cache"]["pages_cached"]
    with opened(server) as page:
        see(page, "#requests")
        page.get_by_role("button", name="Explain a prompt…").click()
        page.get_by_label("Prompt", exact=True).fill(WORDS * 5 + "What now?")
        page.get_by_role("button", name="Explain", exact=True).click()
        page.get_by_text("If it were sent now").wait_for()
        assert page.locator("dialog .spans li").first.inner_text().startswith("from the pool")
    assert server.stats()["cache"]["pages_cached"] == before


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
        for place in ("#causes", "#requests", "#tenants"):
            see(page, place)
            page.locator(f"{place} li, {place}-table tbody tr").first.wait_for()
        chosen_run(page)
        check("page")
        see(page, "#requests")
        see(page, ".request").click()
        page.locator("dialog .spans").wait_for()
        check("explanation")
        page.keyboard.press("Escape")
        page.locator("#key").click()
        check("key")
