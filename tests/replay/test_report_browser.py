"""The report in a real browser: what is drawn, read by keyboard, seen on a phone in the dark."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from reporting import CAPACITIES, HOSTILE, sample, with_more

from kvkeep.bench.replay.report import write_report
from kvkeep.bench.replay.words import share, tokens

# Of each chart's canvas: pixels that are drawn at all, and those that are neither grey nor clear.
DRAWN = """() => Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((figure) => {
  const canvas = figure.querySelector("canvas");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let drawn = 0, coloured = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (!data[at + 3]) continue;
    drawn += 1;
    const [r, g, b] = data.slice(at, at + 3);
    coloured += Math.max(r, g, b) - Math.min(r, g, b) > 60;
  }
  return [figure.dataset.chart, [drawn, coloured]];
}))"""


@pytest.fixture(scope="module")
def outcomes():
    facts, found = sample()
    return facts, with_more(found)


@pytest.fixture(scope="module")
def report(outcomes, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(outcomes[1], path, trace=outcomes[0], advice="More memory.")
    return path


@pytest.fixture
def opened(browser):
    """Opens a page; at its end nothing may have been said on its console, or asked of a network."""

    @contextmanager
    def open_page(path, **settings):
        said, asked = [], []
        settings = {"viewport": {"width": 1100, "height": 900}, **settings}
        context = browser.new_context(**settings)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        yield page
        context.close()
        assert said == []
        assert asked == [path.as_uri()]

    return open_page


PICTURE = "document.querySelector('canvas').toDataURL()"


def redrawn(page, before):
    """The first chart's picture, once it is another one."""
    return page.wait_for_function(f"(before) => {PICTURE} !== before && {PICTURE}", arg=before)


def figure(page, name):
    return page.locator(f'[data-chart="{name}"]')


def plain(text):
    return text.replace("\u00a0", " ")


def test_the_chart_is_drawn(opened, report):
    with opened(report) as page:
        drawn = page.evaluate(DRAWN)
    assert list(drawn) == ["rates"]
    for name, (all_pixels, coloured) in drawn.items():
        assert all_pixels > 3000, name  # axes and grid alone are more
        assert coloured > 300, name  # the lines


def test_it_follows_the_system(opened, report):
    with opened(report, color_scheme="light") as page:
        before = page.evaluate(PICTURE)
        page.emulate_media(color_scheme="dark")
        redrawn(page, before)


def test_charts_are_read_by_keyboard(opened, report, outcomes):
    rates = {
        (one.policy, one.capacity_tokens): plain(share(one.hit_rate)) for one in outcomes[1]
    }  # fmt: skip
    with opened(report) as page:
        chart = figure(page, "rates")
        chart.locator(".plot").focus()
        said = []
        for _ in range(6):
            page.keyboard.press("ArrowRight")
            said.append(plain(chart.locator(".said").inner_text()))
        assert any(
            one.startswith(f"{plain(tokens(CAPACITIES[1]))} tokens: ")
            and f"lru {rates['lru', CAPACITIES[1]]}" in one
            and f"returns {rates['returns', CAPACITIES[1]]}" in one
            and f"belady (bound) {rates['belady', CAPACITIES[1]]}" in one
            for one in said
        ), said
        page.keyboard.press("Home")
        assert plain(chart.locator(".at").inner_text()) == "20 k tokens"
        page.keyboard.press("Escape")
        assert chart.locator(".said").inner_text() == chart.locator(".at").inner_text() == ""


def test_hostile_names_do_nothing(opened, outcomes, tmp_path):
    facts, found = outcomes
    hostile = [
        replace(one, policy=HOSTILE if one.policy == "returns" else one.policy,
                namespaces={HOSTILE: [10, 5], "b": [1, 0]})
        for one in found
    ]  # fmt: skip
    path = tmp_path / "hostile #1%20?.html"
    facts = {**facts, "name": HOSTILE}
    write_report(hostile, path, trace=facts, command=HOSTILE, advice=HOSTILE)
    with opened(path) as page:
        assert page.evaluate("window.taken") is None
        assert page.locator("img").count() == 0
        said = (
            r"</script><script>window.taken=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e&"
        )
        assert said in page.locator("h1").inner_text()
        figure(page, "rates").get_by_role("button", name=said[:39] + "…", exact=True).click()
        assert page.evaluate("window.taken") is None


def test_no_script_runs_that_is_put_in_later(browser, report):
    page = browser.new_page()
    page.goto(report.as_uri())
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("""() => {
          const script = document.createElement("script");
          script.textContent = "window.taken = 2";
          document.body.append(script);
        }""")
    assert page.evaluate("window.taken") is None
    page.close()


def test_one_outcome_is_enough(opened, outcomes, tmp_path):
    facts, found = outcomes
    for name in ("lru", "infinite"):
        one = next(one for one in found if one.policy == name)
        path = tmp_path / f"{name}.html"
        write_report([one], path, trace=facts)
        with opened(path) as page:
            assert page.evaluate("document.querySelectorAll('canvas').length") == 1


def test_without_scripts_the_tables_are_there(browser, report, outcomes):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert "Charts need JavaScript" in page.locator("noscript").inner_text()
    page.locator("summary").first.click()
    row = page.locator("table").first.locator("tbody tr").first.inner_text()
    assert plain(share(outcomes[1][2].hit_rate)) in plain(row)
    context.close()
