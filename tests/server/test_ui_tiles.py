"""The dashboard's tiles in a real browser: they say what the tables say, and draw gaps as gaps."""

from __future__ import annotations

import re
import threading

import pytest
from browsing import WORDS, complete, live, plain, see, until
from see_help import ask, forget_pool, storing, tokens_of

from faults import FaultyBackend
from kvkeep.store.backends.memory import MemoryBackend

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

LONG = 257  # four blocks, and the last token
# Both in one turn of the page's event loop: no answer is drawn between them.
BOTH = """() => {
  const text = (node) => node.textContent.replaceAll("\\u00a0", " ");
  const rows = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].map((row) =>
    Object.fromEntries([...row.children].map((cell) => [cell.dataset.label, text(cell)])));
  const tile = (id) => ({value: text(document.querySelector(`#${id} .value`)),
    note: text(document.querySelector(`#${id} .note`))});
  return {
    rate: tile("rate"), saved: tile("saved-tile"), tiers: tile("tiers-tile"),
    evictions: tile("evictions-tile"), errors: tile("errors-tile"),
    lines: [...document.querySelectorAll("#tiers-tile .lines li")].map((one) =>
      ({kind: one.dataset.kind, name: text(one.querySelector("b")), about: text(one)})),
    history: text(document.getElementById("history-said")),
    savedRows: rows("saved-table"), lossRows: rows("losses-table"), tierRows: rows("tiers-table"),
    kinds: [...document.querySelectorAll("#tiers-table .health")].map((one) => one.dataset.kind),
  };
}"""
RATE = re.compile(r"([\d.]+) %")
FAILURES = {"requests failed", "requests timed out", "calls failed", "reads came late",
            "records damaged", "blocks not written"}  # fmt: skip


def number(text):
    return int(text.replace(",", ""))


def agree(told):
    """Each tile says what its table says."""
    saved = {row["reused from"]: row for row in told["savedRows"]}
    if saved:
        assert told["saved"]["value"] == saved["in all"]["time saved"]
        tokens = saved["in all"]["tokens"]
        assert f": {tokens} token" in told["saved"]["note"]
        assert number(tokens) == sum(number(row["tokens"]) for name, row in saved.items()
                                     if name != "in all")  # fmt: skip
    else:
        assert told["saved"]["value"] == "–"
    losses = told["lossRows"]
    pages = [row for row in losses if row["what"] == "pages evicted"]
    blocks = [row for row in losses if row["what"] == "blocks evicted"]
    minute, total = pages[0]["last minute"] if pages else "0", "0"
    total = pages[0]["since the start"] if pages else "0"
    assert told["evictions"]["value"] == minute
    assert f", {total} since the start" in told["evictions"]["note"]
    if blocks:
        assert (
            f"{sum(number(row['last minute']) for row in blocks)} block"
            in told["evictions"]["note"]
        )
    failed = [row for row in losses if row["what"] in FAILURES]
    assert number(told["errors"]["value"]) == sum(number(row["last minute"]) for row in failed)
    assert (
        f", {sum(number(row['since the start']) for row in failed)} since the start"
        in (told["errors"]["note"])
    )
    works, places = told["kinds"].count("good"), len(told["kinds"])
    assert told["tiers"]["value"] == (f"{works} of {places}" if places else "–")
    rows = {row["tier"].partition(" ")[0]: row for row in told["tierRows"]}
    for line in told["lines"]:
        name = next(one for one in rows if one.startswith(line["name"]))
        fill = line["about"].removeprefix(line["name"]).strip().partition(" ")[0]
        assert rows[name]["filled"].startswith(fill) or "used" in line["about"]
        assert line["kind"] == "good" or rows[name]["health"] in line["about"]
    evicted = {row["where"]: row["since the start"] for row in blocks}
    for name, row in rows.items():
        place = next((one for one in evicted if name.startswith(one)), None)
        assert row["evicted"] == (evicted[place] if place else "–")
    assert told["rate"]["value"] == "–" or told["rate"]["value"].endswith("%")


@pytest.fixture
def faulty():
    """A tier below memory that does what it is told; its faults end with the test."""
    backend = FaultyBackend(MemoryBackend(64 << 20))
    backend.timeout = 0.3
    yield backend
    backend.heal()


def test_tiles_and_tables_agree_while_it_works_and_after_a_tier_failed(opened, faulty):
    with storing("memory://1MiB", faulty, num_pages=64) as server, opened(server) as page:
        live(page)
        agree(page.evaluate(BOTH))
        prompts = [tokens_of(seed, LONG) for seed in range(6)]

        def load():
            for prompt in (*prompts, *prompts):
                ask(server, prompt)

        thread = threading.Thread(target=load)
        thread.start()
        for _ in range(12):
            agree(page.evaluate(BOTH))
            page.wait_for_timeout(250)
        thread.join()
        until(page, "document.querySelectorAll('#losses-table tbody tr').length > 0")
        until(page, "document.querySelector('#saved-table tbody tr') !== null")
        told = page.evaluate(BOTH)
        agree(told)
        assert told["tiers"]["value"] == "2 of 2"
        forget_pool(server)
        faulty.fail("get", "sizes", "put")
        for prompt in prompts:
            ask(server, prompt)
        until(page, "document.querySelector('#tiers-tile [data-kind=bad]') !== null")
        told = page.evaluate(BOTH)
        agree(told)
        assert told["tiers"]["value"] == "1 of 2"
        assert told["lines"][0]["name"] == "faulty"
        assert "failed: no " in told["lines"][0]["about"]
        until(page, "document.getElementById('errors-tile').dataset.kind === 'bad'")
        agree(page.evaluate(BOTH))


def test_the_present_pool_and_what_tiers_gave_make_up_the_hit_rate(opened):
    prompts = [tokens_of(seed, LONG) for seed in range(4)]
    with storing("memory://64MiB", num_pages=256, what_if=1.0) as server:
        for prompt in (*prompts, *prompts):
            ask(server, prompt)
        forget_pool(server)
        for prompt in prompts:
            ask(server, prompt)
        totals = server.http.get("/kv/live").json()["totals"]
        assert 0 < totals["loaded_tokens"] < totals["cached_tokens"]
        with opened(server) as page:
            live(page)
            until(page, "document.querySelector('#whatif-points .now') !== null")
            now = plain(page.locator("#whatif-points .now").inner_text())
            said = plain(page.locator("#whatif-said").inner_text())
            whole = plain(page.locator("#rate .note").inner_text())
            said = said.partition("Of the pool alone: tiers gave ")[2]
            pool, besides, rate = (float(RATE.search(text)[1]) for text in (now, said, whole))
            assert abs(pool + besides - rate) <= 1.5
            assert abs(rate - 100 * totals["cached_tokens"] / totals["prompt_tokens"]) <= 0.5


def test_requests_that_fail_are_counted(server, opened):
    with opened(server) as page:
        live(page)
        before = page.evaluate(BOTH)["errors"]["value"]
        body = {"prompt": WORDS * 2000, "max_tokens": 1}  # too long for the model
        assert server.http.post("/v1/completions", json=body).status_code == 400
        until(page, "document.getElementById('losses-table').textContent.includes('refused')")
        told = page.evaluate(BOTH)
        agree(told)
        assert told["errors"]["value"] == before  # what a client did wrong is none of ours


# --- gaps ------------------------------------------------------------------------------------

LINES = "document.querySelector('#running .line').getAttribute('d').split('M').length - 1"


# --- what a server does not tell -------------------------------------------------------------


def test_what_a_server_does_not_tell_has_no_part(server, opened):
    complete(server, WORDS * 4)
    kept = {
        "at",
        "uptime_s",
        "version",
        "model",
        "explain",
        "running",
        "waiting",
        "totals",
        "tiers",
    }

    def fewer(route):
        answer = route.fetch()
        told = {name: value for name, value in answer.json().items() if name in kept}
        route.fulfill(response=answer, json=told)

    def absent(route):
        route.fulfill(
            status=404, json={"error": {"message": "there is no such path", "code": None}}
        )

    with opened(server, expected=["404"]) as page:
        page.route("**/kv/live", fewer)
        page.route("**/kv/map*", absent)
        page.reload()
        live(page)
        for hidden in ("#kept", "#pool", "#ask", "#history-card", "#whatif-card", "#saved",
                       "#losses", "#tenants"):  # fmt: skip
            assert page.locator(hidden).is_hidden(), hidden
        assert page.locator("#saved-tile .note").inner_text() == "Not told by this server."
        assert page.locator("#warm .note").inner_text() == "Not told by this server."
        see(page, "#causes")
        page.locator(".causes > li").first.wait_for()
        page.unroute_all()


# --- causes ----------------------------------------------------------------------------------


def test_what_can_be_changed_comes_first_and_what_was_never_seen_last(start_server, opened):
    with start_server() as server:
        rest = " Remember it well, and answer every question as exactly as you can. " * 3
        complete(server, "Nothing like this was ever asked of anybody. " * 30)
        for minute in range(3):
            complete(server, f"The clock says it is 10:0{minute} now." + rest)
        with opened(server) as page:
            see(page, "#causes")
            page.locator(".causes > li").first.wait_for()
            titles = page.locator("#causes h2, #causes h3").all_inner_texts()
            assert titles == ["Why tokens were computed", "Something can be done", "Nothing to do"]
            first = page.locator("#causes-change-list > li").first.inner_text()
            assert "differ at token" in first
            assert "Move what changes" in first
            shares = page.locator("#causes .portion b").all_inner_texts()
            assert len(shares) >= 2
            last = page.locator("#causes-rest-list > li").last
            assert "never seen" in last.inner_text()
            said = plain(page.locator("#causes-said").inner_text())
            assert "that were never seen before" in said
            last.get_by_role("button").click()
            page.locator("dialog .spans").wait_for()


# --- on a phone ------------------------------------------------------------------------------
