"""The report in a real browser: what is drawn, read by keyboard, seen on a phone in the dark."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from reporting import CAPACITIES, HOSTILE, PRICES, sample, with_more

from kvkeep.bench.replay.report import write_report
from kvkeep.bench.replay.words import duration, money, share, tokens

CHARTS = ["rates", "time", "gap", "life", "ago", "wait", "ttft", "jobs", "cost"]
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
    write_report(outcomes[1], path, trace=outcomes[0], prices=PRICES, advice="More memory.")
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


def test_every_chart_is_drawn(opened, report):
    with opened(report) as page:
        drawn = page.evaluate(DRAWN)
    assert list(drawn) == CHARTS
    for name, (all_pixels, coloured) in drawn.items():
        assert all_pixels > 3000, name  # axes and grid alone are more
        assert coloured > 300, name  # the lines


def test_light_dark_and_narrow(opened, report):
    looks = {}
    for name, settings in {
        "light": {"color_scheme": "light"},
        "dark": {"color_scheme": "dark"},
        "phone": {"color_scheme": "dark", "viewport": {"width": 360, "height": 740},
                  "is_mobile": True, "has_touch": True},
    }.items():  # fmt: skip
        with opened(report, **settings) as page:
            wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide <= room, f"{name} scrolls sideways"
            looks[name] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert all(coloured > 100 for _, coloured in page.evaluate(DRAWN).values())
            fits = """[...document.querySelectorAll(".plot")].every((plot) => {
              const canvas = plot.querySelector("canvas");
              return canvas.clientWidth <= plot.clientWidth + 1
                && canvas.clientHeight <= plot.clientHeight + 1;
            })"""
            assert page.evaluate(fits)
    assert looks["light"] != looks["dark"] == looks["phone"]


def test_the_switch_turns_everything(opened, report):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(report, color_scheme="dark") as page:
        before, dark = page.evaluate(PICTURE), page.evaluate(ground)
        page.get_by_role("button", name="Show it light").click()
        light = redrawn(page, before).json_value()
        assert page.evaluate(ground) != dark
        page.get_by_role("button", name="Show it dark").click()
        assert redrawn(page, light).json_value() == before
        page.emulate_media(color_scheme="light")  # what was chosen here stays
        assert page.evaluate(ground) == dark


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
        assert plain(chart.locator(".at").inner_text()) == "10 k tokens"  # of the what-if curve
        page.keyboard.press("Escape")
        assert chart.locator(".said").inner_text() == chart.locator(".at").inner_text() == ""


def test_pointing_at_a_chart_reads_it(opened, report, outcomes):
    with opened(report) as page:
        over = figure(page, "ttft").locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
        legend = figure(page, "ttft").locator(".legend")
        last = next(
            one for one in outcomes[1]
            if (one.policy, one.capacity_tokens) == ("lru", CAPACITIES[-1])
        )  # fmt: skip
        assert plain(legend.locator(".at").inner_text()) == "200 k tokens"
        shown = plain(legend.get_by_role("button", name="lru").locator(".value").inner_text())
        assert shown == plain(duration(last.latency["ttft_s"]["p50"]))
        page.locator("#percentile").select_option("p99")
        page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 20)
        assert plain(legend.locator(".value").first.inner_text()) == "4 s"
        over = figure(page, "jobs").locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        page.locator("#job-percentile").select_option("p90")
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
        legend = figure(page, "jobs").locator(".legend")
        assert plain(legend.locator(".value").first.inner_text()) == "5 min"


def test_lines_are_switched(opened, report):
    with opened(report) as page:
        button = figure(page, "rates").get_by_role("button", name="returns", exact=True)
        before = page.evaluate(PICTURE)
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        without = redrawn(page, before).json_value()
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert redrawn(page, without).json_value() == before
        assert button.get_attribute("aria-pressed") == "true"


def test_dragging_looks_closer_and_escape_goes_back(opened, report):
    with opened(report) as page:
        page.locator('[data-chart="rates"] .u-over').scroll_into_view_if_needed()
        before = page.evaluate(PICTURE)
        box = figure(page, "rates").locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
        page.mouse.up()
        closer = redrawn(page, before).json_value()
        figure(page, "rates").locator(".plot").focus()
        page.keyboard.press("Escape")
        assert redrawn(page, closer).json_value() == before


def test_another_capacity_draws_and_fills_anew(opened, report, outcomes):
    lines = {(one.policy, one.capacity_tokens): one for one in outcomes[1]}
    with opened(report) as page:
        chart = figure(page, "ago")
        chart.locator("summary").click()
        for capacity in CAPACITIES:
            page.locator("#capacity").select_option(str(capacity))
            names = chart.locator("thead th").all_inner_texts()
            assert set(names) <= {"time", "belady", "lru", "returns"}
            if "lru" not in names:
                assert not lines["lru", capacity].evicted_ago
                continue
            cells = chart.locator("tbody tr").evaluate_all(
                "(rows, at) => rows.map((row) => row.cells[at].textContent)", names.index("lru")
            )
            counted = [row[1] for row in lines["lru", capacity].evicted_ago]
            found = [plain(one) for one in cells if one != "–"]
            assert found == [plain(tokens(one)) for one in [*counted, 0]]  # 0: where it ends


def test_costs_are_read(opened, report, outcomes):
    with opened(report) as page:
        chart = figure(page, "cost")
        chart.locator(".plot").focus()
        page.keyboard.press("End")
        said = plain(chart.locator(".said").inner_text())
    best = max(
        (one for one in outcomes[1] if one.policy != "infinite"),
        key=lambda one: (round(one.hit_rate, 9), one.capacity_tokens),
    )
    assert said.startswith(f"{plain(share(best.hit_rate))}, {plain(tokens(best.capacity_tokens))}")
    total = PRICES.month(best, outcomes[0]["span_s"]).total
    assert plain(money(float(f"{total:.5g}"), "$")) in said


def test_hostile_names_do_nothing(opened, outcomes, tmp_path):
    facts, found = outcomes
    hostile = [
        replace(one, policy=HOSTILE if one.policy == "returns" else one.policy,
                namespaces={HOSTILE: [10, 5], "b": [1, 0]})
        for one in found
    ]  # fmt: skip
    path = tmp_path / "hostile #1%20?.html"
    facts = {**facts, "name": HOSTILE}
    write_report(hostile, path, trace=facts, prices=PRICES, command=HOSTILE, advice=HOSTILE)
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
        write_report([one], path, trace=facts, prices=PRICES)
        with opened(path) as page:
            canvas = page.evaluate("document.querySelectorAll('canvas').length")
            assert canvas >= (1 if name == "infinite" else 3)


def test_without_scripts_the_tables_are_there(browser, report, outcomes):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert "Charts need JavaScript" in page.locator("noscript").inner_text()
    page.locator("summary").first.click()
    row = page.locator("table").first.locator("tbody tr").first.inner_text()
    assert plain(share(outcomes[1][2].hit_rate)) in plain(row)
    assert page.locator("#theme").is_hidden()
    context.close()


def test_the_page_writes_figures_as_its_tables_do(opened, report):
    amounts = [0, 1, 12, 99.5, 999, 1000, 1234, 16_384, 99_950, 999_499, 999_600, 3e6, 12_345_678]
    spans = [0.0625, 0.5, 1, 59, 89, 90, 600, 5399, 5400, 86_400, 200_000, 2e6]
    with opened(report) as page:
        assert page.evaluate("(all) => all.map(tokens)", amounts) == [
            plain(tokens(one)) for one in amounts
        ]
        assert page.evaluate("(all) => all.map(seconds)", spans) == [
            plain(duration(one)) for one in spans
        ]
        shares = [0, 0.1364, 0.5, 1]
        assert page.evaluate("(all) => all.map(share)", shares) == [
            plain(share(one)) for one in shares
        ]
        prices = [0.5, 3.25, 99, 100, 1234.4, 73_050]
        assert page.evaluate("(all) => all.map(money)", prices) == [
            money(one, "$") for one in prices
        ]
