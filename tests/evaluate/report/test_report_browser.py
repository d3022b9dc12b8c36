"""The report in a real Chromium, opened from disk: it draws, answers to mouse and keys, fits a phone, prints, stays silent.

Screenshots of both widths are left in the folder that ``TAILGUARD_SCREENSHOTS`` names, else in pytest's own.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from browser import NAMES, Browser, find_browser
from report_examples import rich_evaluation
from test_report_page import HOSTILE

from tailguard.evaluate.report import compare, write_page, write_report
from tailguard.evaluate.report.formatting import TIMES

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH (Debian: apt-get install chromium)"
)
CHARTS = "[...document.querySelectorAll('[data-figure]')]"
# What a drawn panel must have: lines with more than one point, or bars, dots or rows; and words for those who cannot see.
EMPTY = """[...document.querySelectorAll('.plot > svg')].filter((chart) => {
  const shapes = chart.querySelectorAll('.line, .band, .area, .bar, .dot, .range');
  const broken = [...shapes].some((shape) => /NaN|undefined|Infinity/.test(shape.outerHTML));
  const drawn = [...shapes].some((shape) => (shape.getAttribute('d') || 'LL').includes('L') || shape.tagName !== 'path');
  return !drawn || broken || !chart.getAttribute('aria-label');
}).map((chart) => chart.getAttribute('aria-label'))"""
OPEN_ALL = "document.querySelectorAll('.away').forEach((pane) => pane.classList.remove('away'))"
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(true), 50))))"


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    chosen = os.environ.get("TAILGUARD_SCREENSHOTS")
    path = Path(chosen) if chosen else tmp_path_factory.mktemp("report")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def page(folder):
    return write_report(rich_evaluation(), folder / "report.html")


def place(browser, selector):
    """The box of the first such element, scrolled into the middle of the window."""
    browser.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    return browser.evaluate(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
        "return {x: box.x, y: box.y, width: box.width, height: box.height}; })()"
    )


def hover(browser, selector, across=0.5, down=0.5):
    box = place(browser, selector)
    browser.hover(box["x"] + across * box["width"], box["y"] + down * box["height"])


@pytest.mark.parametrize(("width", "name"), [(1440, "wide"), (390, "narrow")])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_draws_every_chart_without_a_complaint(browser, page, folder, width, name, dark):
    browser.open(page, width, 900, dark=dark, phone=width < 500)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    shot = folder / f"{name}-{'dark' if dark else 'light'}.png"
    browser.screenshot(shot, whole=True)
    assert shot.stat().st_size > 100_000
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate(OPEN_ALL)
    browser.evaluate(SETTLED)
    assert browser.evaluate(f"{CHARTS}.length") == 23
    assert browser.evaluate(f"{CHARTS}.filter((host) => !host.querySelector('.plot > svg')).length") == 0
    assert browser.evaluate(EMPTY) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(browser, page, dark):
    """WCAG 2 asks for a contrast of 4.5 for text; 3 for shapes that carry meaning."""
    browser.open(page, dark=dark)
    ratios = browser.evaluate("""(() => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const hex = style.getPropertyValue(name).trim().slice(1);
        const part = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
      };
      const paper = light('--paper');
      const ratio = (name) => { const [a, b] = [light(name), paper].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
      return Object.fromEntries(['--ink', '--soft', '--agent', '--market', '--third', '--fourth', '--other', '--seed']
        .map((name) => [name, ratio(name)]));
    })()""")
    assert all(ratio >= 4.5 for name, ratio in ratios.items() if name not in ("--other", "--seed")), ratios
    assert min(ratios["--seed"], ratios["--other"]) >= 2.5, ratios


def test_hovering_tells_the_numbers(browser, page):
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('.tip:not([hidden])').length") == 0
    hover(browser, "[data-figure='equity'] .plot > svg")
    told = browser.evaluate("document.querySelector('[data-figure=\"equity\"] .tip:not([hidden])').innerText")
    assert "agent" in told
    assert "buy and hold" in told
    assert TIMES in told
    # One cursor for both panels: the drawdown below shows the same day.
    assert browser.evaluate("document.querySelectorAll('[data-figure=\"equity\"] .cursor').length") == 2
    browser.hover(2, 2)
    assert browser.evaluate("document.querySelectorAll('.tip:not([hidden]), .cursor').length") == 0
    hover(browser, "[data-figure='fold-rows'] .plot > svg", down=0.4)
    assert "seed" in browser.evaluate("document.querySelector('[data-figure=\"fold-rows\"] .tip:not([hidden])').innerText")
    assert browser.problems == []


def test_a_tap_tells_the_numbers_until_the_next_one_elsewhere(browser, page):
    browser.open(page, 390, 844, phone=True)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    box = place(browser, "[data-figure='equity'] .plot > svg")
    for x, y, shown in ((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, 1), (5, 200, 0)):
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.evaluate(SETTLED)
        assert browser.evaluate("document.querySelectorAll('.tip:not([hidden])').length") == shown
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert browser.problems == []


def test_arrow_keys_move_the_cursor_and_are_read_aloud(browser, page):
    browser.open(page)
    browser.evaluate("document.querySelector('[data-figure=\"rolling\"] .plot > svg').focus()")
    browser.press("End", 35)
    last = browser.evaluate("document.querySelector('[data-figure=\"rolling\"] [aria-live]').textContent")
    browser.press("ArrowLeft", 37)
    before = browser.evaluate("document.querySelector('[data-figure=\"rolling\"] [aria-live]').textContent")
    assert "agent" in last
    assert "agent" in before
    assert last != before
    browser.press("Escape", 27)
    assert browser.evaluate("document.querySelectorAll('.cursor').length") == 0
    assert browser.problems == []


def test_tabs_open_by_click_and_by_key(browser, page):
    browser.open(page)
    shown = "getComputedStyle(document.getElementById('comparison-tabs-pane-{}')).display"
    assert browser.evaluate(shown.format(0)) == "block"
    assert browser.evaluate(shown.format(1)) == "none"
    browser.evaluate("document.getElementById('comparison-tabs-tab-1').click()")
    assert browser.evaluate(shown.format(0)) == "none"
    assert browser.evaluate(shown.format(1)) == "block"
    browser.evaluate(SETTLED)
    assert browser.evaluate("document.querySelectorAll('[data-figure=\"rows-sharpe\"] .range').length") == 9
    browser.evaluate("document.getElementById('comparison-tabs-tab-1').focus()")
    browser.press("ArrowRight", 39)
    assert browser.evaluate("document.activeElement.id") == "comparison-tabs-tab-2"
    assert browser.evaluate(shown.format(2)) == "block"
    assert (
        browser.evaluate("[...document.querySelectorAll('#comparison [role=tab]')].filter(t => t.tabIndex === 0).length") == 1
    )
    assert browser.problems == []


def test_a_click_in_the_legend_brings_a_series_forward(browser, page):
    browser.open(page)
    key = "[...document.querySelectorAll('[data-figure=\"equity\"] button.key')].find(k => k.textContent === 'momentum')"
    browser.evaluate(f"{key}.click()")
    # In each of two panels: the chosen one and the agent stay, the seven other baselines step back.
    assert browser.evaluate("document.querySelectorAll('[data-figure=\"equity\"] .mark.faded').length") == 14
    assert browser.evaluate(f"{key}.getAttribute('aria-pressed')") == "true"
    browser.evaluate(f"{key}.click()")
    assert browser.evaluate("document.querySelectorAll('.mark.faded').length") == 0
    assert browser.problems == []


def test_dragging_looks_closer_and_leads_back(browser, page):
    browser.open(page)
    ticks = "[...document.querySelectorAll('[data-figure=\"equity\"] .plot:last-child .tick.middle')].map(t => t.textContent)"
    years = browser.evaluate(ticks)
    box = place(browser, "[data-figure='equity'] .plot > svg")
    y = box["y"] + box["height"] / 2
    for kind, share in (("mousePressed", 0.4), ("mouseMoved", 0.45), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        x = box["x"] + share * box["width"]
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    months = browser.evaluate(ticks)
    assert months != years
    assert browser.evaluate("document.querySelectorAll('[data-figure=\"equity\"] clipPath').length") == 2
    assert browser.evaluate(EMPTY) == []
    browser.evaluate("document.querySelector('[data-figure=\"equity\"] .closer button').click()")
    assert browser.evaluate(ticks) == years
    assert browser.problems == []


def test_downloads_give_the_embedded_files(browser, page, tmp_path):
    browser.open(page)
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    wanted = {
        "metrics.json": "[data-download='json']",
        "metrics.csv": "[data-download='csv']",
        "equity.csv": "[data-csv='equity']",
    }
    for name, button in wanted.items():
        browser.evaluate(f"document.querySelector({button!r}).click()")
        browser.evaluate(
            "new Promise(done => setTimeout(() => done(true), 400))",
        )
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.endswith("\n")
    assert (tmp_path / "equity.csv").read_text(encoding="utf-8").startswith("panel,series,x,y,low,high\n")
    assert "\nValue of 1 invested,agent,2020-" in (tmp_path / "equity.csv").read_text(encoding="utf-8")
    assert browser.problems == []


def test_prints_with_every_tab_open(browser, page, folder):
    browser.open(page)
    browser.pdf(folder / "report.pdf")
    assert (folder / "report.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "report.pdf").stat().st_size > 100_000
    browser.call("Emulation.setEmulatedMedia", media="print")
    # A4 less its margins is 680 pixels wide; anything wider would shrink all of the page.
    browser.call("Emulation.setDeviceMetricsOverride", width=680, height=960, deviceScaleFactor=1, mobile=False)
    browser.evaluate(SETTLED)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 680
    hidden = browser.evaluate("[...document.querySelectorAll('[role=tabpanel]')].filter(p => !p.offsetHeight).length")
    assert hidden == 0
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.problems == []


def test_hostile_names_stay_text(browser, folder):
    record = rich_evaluation(bars=300)
    title = f"before{HOSTILE}"
    path = write_report(replace(record, title=title, source=HOSTILE, warnings=[HOSTILE]), folder / "hostile.html")
    browser.open(path)
    assert browser.evaluate("document.title").startswith("before<script>")
    assert browser.evaluate("document.querySelector('.masthead span').textContent") == title
    assert browser.evaluate("document.images.length") == 0
    assert browser.problems == []


def test_the_policy_stops_what_slips_in(browser, page, folder):
    """The second wall: even a script that got into the page does not run."""
    html = page.read_text(encoding="utf-8").replace("</main>", '<script>document.title="broken"</script></main>', 1)
    (folder / "smuggled.html").write_text(html, encoding="utf-8")
    browser.open(folder / "smuggled.html")
    assert browser.evaluate("document.title") != "broken"
    assert any("Content Security Policy" in str(problem) for problem in browser.problems)


def test_runs_side_by_side(browser, folder):
    records = [rich_evaluation(bars=400, seed=seed) for seed in range(3)]
    path = write_page(compare(records, ["first", "second", "third"]), folder / "compare.html")
    for width in (1440, 390):
        browser.open(path, width, 900, phone=width < 500)
        browser.evaluate(OPEN_ALL)
        browser.evaluate(SETTLED)
        assert browser.evaluate(EMPTY) == []
        assert browser.evaluate(f"{CHARTS}.length") == 5
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.problems == []
    browser.screenshot(folder / "compare-narrow.png", whole=True)
