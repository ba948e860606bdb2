"""The page in a browser: headless Chromium, which Playwright drives."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard_runs import WrittenRun
from dashboard_server import served
from shoal.results.node_data import NodeData, write_node_data
from shoal.results.records import Evaluation, RunFolder, encode

playwright = pytest.importorskip("playwright.sync_api", reason="the tests of the page need playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the tests of the page need chromium")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"),
]
playwright.expect.set_options(timeout=30_000)
NAME = "<img src=x onerror=alert(1)>"
"""A name with markup, which must be shown as text."""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: playwright.Browser) -> Iterator[playwright.Page]:
    """A page that must have no error in its console, and must not open a dialog."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(30_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()
    assert not problems


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    WrittenRun(tmp_path / "a", "first", nodes=12, rounds=20, degree=4, failing=3).finish()
    WrittenRun(tmp_path / "b", "second", nodes=12, rounds=20, degree=2, seed=2, dynamic=True).finish()
    return tmp_path


@contextlib.contextmanager
def site(page: playwright.Page, root: Path) -> Iterator[str]:
    """Serve the runs in a folder, and leave the page before the server ends."""
    with served(root) as url:
        yield url
        page.goto("about:blank")


def run_url(url: str, folder: str, tab: str, seed: int = 1) -> str:
    return f"{url}/#/run/{folder}%2F2026010{seed}-120000-abcdef/{tab}"


def created(seed: int) -> int:
    """When the run with this seed was created, in seconds since 1970."""
    return int(time.mktime(time.strptime(f"2026010{seed}", "%Y%m%d")))


def tile(page: playwright.Page, name: str) -> playwright.Locator:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd")


def top_of_circle(page: playwright.Page) -> tuple[float, float]:
    """Return where the first node is on the screen: few nodes are drawn as a circle that begins at its top."""
    box = page.locator(".stage").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2 - 0.45 * min(box["width"], box["height"])


def test_a_live_run_advances(page: playwright.Page, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "live", NAME, nodes=10, rounds=30)
    run.advance(4)
    with site(page, tmp_path) as url:
        page.goto(url)
        playwright.expect(page.locator(".badge")).to_have_text("running")
        page.get_by_role("link", name=NAME).click()
        playwright.expect(page.locator("h1")).to_have_text(NAME)
        playwright.expect(tile(page, "Round")).to_have_text("4 of 30")
        before = tile(page, "accuracy").inner_text()
        run.advance(8)
        playwright.expect(tile(page, "Round")).to_have_text("12 of 30")
        playwright.expect(tile(page, "accuracy")).not_to_have_text(before)
        run.finish()
        playwright.expect(page.locator("h1 + span")).to_have_text("completed")
        playwright.expect(tile(page, "Round")).to_have_text("30")


def test_a_click_on_a_node_shows_its_curves_records_and_events(page: playwright.Page, runs: Path) -> None:
    data = NodeData([7] * 12, [[3, 4]] * 12)
    write_node_data(RunFolder(runs / "b" / "20260102-120000-abcdef"), data)
    with site(page, runs) as url:
        page.goto(run_url(url, "b", "graph", seed=2))
        playwright.expect(page.locator(".counts")).to_contain_text("12 nodes, ")
        page.mouse.click(*top_of_circle(page))
        panel = page.locator("aside")
        playwright.expect(panel.locator("h2")).to_contain_text("Node 0")
        playwright.expect(panel).to_contain_text("31 records")
        playwright.expect(panel).to_contain_text("7 training samples")
        bars = [bar.bounding_box() for bar in panel.locator(".bar").all()]
        assert [box is not None and box["width"] > 1 and box["height"] > 1 for box in bars] == [True, True]
        assert panel.locator(".u-over").count() == 2
        panel.get_by_text("Latest records").click()
        playwright.expect(panel.locator("pre")).to_contain_text('"kind":"end"')
        page.goto(run_url(url, "a", "graph"))
        page.get_by_label("Number of the node").fill("3")
        page.keyboard.press("Enter")
        playwright.expect(panel).to_contain_text("node 3 crashes")
        page.get_by_label("Colour by").select_option("state")
        page.get_by_label("Colour by").select_option("lag")
        playwright.expect(page.locator(".scale")).to_contain_text("rounds behind")


def test_metrics_may_have_the_names_of_javascript(page: playwright.Page, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "names", nodes=4, rounds=2, evaluate_every=10)
    run.advance(2)
    scores = {"__proto__": 0.5, "constructor": 0.25, "accuracy": 0.75}
    for node in range(4):
        with run.folder.node(node).open("ab") as file:
            file.write(encode(Evaluation(1, 2.0, scores)) + b"\n")
    run.finish()
    with site(page, tmp_path) as url:
        page.goto(run_url(url, "names", "curves"))
        playwright.expect(tile(page, "Sent")).to_have_text("16.0 kB")
        for metric in scores:
            page.get_by_label("Metric").select_option(metric)
            playwright.expect(page.locator("figure h3").first).to_have_text(f"{metric} by rounds")
        page.get_by_role("tab", name="Graph").click()
        page.get_by_label("Colour by").select_option("__proto__")
        page.get_by_label("Number of the node").fill("1")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("aside")).to_contain_text("4.00 kB sent")
        assert page.evaluate("() => Object.keys(Object.prototype)") == []
        assert page.evaluate("() => [Object.mean, Object.round]") == [None, None]


def test_the_panel_of_a_node_shows_the_end_of_a_run(page: playwright.Page, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "live", nodes=4, rounds=10)
    run.advance(4)
    with site(page, tmp_path) as url:
        page.goto(run_url(url, "live", "graph"))
        playwright.expect(page.locator(".counts")).to_contain_text("4 nodes")
        page.get_by_label("Number of the node").fill("2")
        page.keyboard.press("Enter")
        facts = page.locator("aside .facts").first
        playwright.expect(facts).to_have_text("running · round 4 · 8.00 kB sent · 6 records")
        run.advance(2)
        playwright.expect(facts).to_have_text("running · round 6 · 12.0 kB sent · 9 records")
        run.finish()
        playwright.expect(facts).to_have_text("ended · round 10 · 20.0 kB sent · 16 records")


def test_the_slider_replays_a_finished_run(page: playwright.Page, runs: Path) -> None:
    with site(page, runs) as url:
        page.goto(run_url(url, "b", "graph", seed=2))
        slider = page.get_by_label("Time of the replay")
        playwright.expect(page.locator(".replay output")).to_contain_text("round 20")
        slider.focus()
        page.keyboard.press("Home")
        playwright.expect(page.locator(".replay output")).to_contain_text("round 1,")
        with page.expect_response(lambda response: "/api/state" in response.url) as response:
            page.keyboard.press("ArrowRight")
        assert response.value.ok
        playwright.expect(page.locator(".replay output")).to_contain_text("round 2,")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.keyboard.press("ArrowLeft")
        playwright.expect(page.locator(".replay output")).to_contain_text("round 1,")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(300)
        assert asked == [], "the page has these states already"
        page.get_by_role("button", name="Play").click()
        playwright.expect(page.locator(".replay output")).to_contain_text("round 20")
        playwright.expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_two_runs_are_compared_in_one_chart(page: playwright.Page, runs: Path) -> None:
    with site(page, runs) as url:
        page.goto(url)
        page.get_by_role("checkbox").nth(0).check()
        page.get_by_role("checkbox").nth(1).check()
        page.get_by_role("button", name="Compare 2 runs").click()
        playwright.expect(page.locator("figure .key")).to_have_count(2)
        playwright.expect(page.locator("figure .key").first).to_contain_text("seed = 2")
        playwright.expect(page.locator("thead")).to_contain_text("topology.degree")
        page.get_by_label("By").select_option("bytes")
        page.get_by_label("Metric").select_option("loss")
        playwright.expect(page.locator("figure h3")).to_have_text("loss, mean over the nodes")


def test_long_settings_and_equal_names_stay_readable(page: playwright.Page, tmp_path: Path) -> None:
    for folder, settings in (("a", ""), ("b", ""), ("c", "x" * 300)):
        run = WrittenRun(tmp_path / folder, "same")
        run.finish()
        if settings:
            with run.folder.experiment.open("a") as file:
                file.write(f'\n[dataset]\nname = "{settings}"\n')
    with site(page, tmp_path) as url:
        page.goto(url)
        names = page.locator("td.name")
        playwright.expect(names).to_have_count(3)
        page.set_viewport_size({"width": 400, "height": 800})
        assert min(box["width"] for name in names.all() if (box := name.bounding_box())) >= 180
        page.set_viewport_size({"width": 1280, "height": 900})
        ids = [f"{folder}%2F20260101-120000-abcdef" for folder in "abc"]
        page.goto(f"{url}/#/compare/{'/'.join(ids)}")
        playwright.expect(page.locator("thead")).to_contain_text("dataset")
        box = page.get_by_title("x" * 300).bounding_box()
        assert box is not None
        assert box["width"] <= 300
        assert min(box["width"] for name in names.all() if (box := name.bounding_box())) >= 180
        assert names.all_inner_texts() == [
            "same, a/20260101-120000-abcdef",
            "same, b/20260101-120000-abcdef",
            f"same, dataset = {'x' * 39}…",
        ]


def test_the_timeline_shows_what_nodes_did(page: playwright.Page, runs: Path) -> None:
    with site(page, runs) as url:
        page.goto(run_url(url, "a", "timeline"))
        playwright.expect(page.locator(".tools .moment")).to_have_text("0.00 s to 20.1 s")
        page.get_by_role("button", name="Zoom in").click()
        playwright.expect(page.locator(".tools .moment")).to_have_text("5.03 s to 15.1 s")
        page.get_by_label("Order by").select_option("train")
        playwright.expect(page.locator("canvas.timeline")).to_have_attribute(
            "aria-label", re.compile("5.03 s to 15.1 s")
        )
        pixels = page.evaluate(
            "() => { const c = document.querySelector('canvas.timeline'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const found = new Set();"
            " for (let i = 0; i < d.length; i += 4) found.add(d[i] + ',' + d[i+1] + ',' + d[i+2]); return [...found]; }"
        )
        assert {"0,114,178", "240,193,105", "0,158,115", "213,94,0"} <= set(pixels), "train, wait, send, failed"


def test_the_theme_can_be_switched_and_is_kept(page: playwright.Page, runs: Path) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with site(page, runs) as url:
        page.goto(run_url(url, "a", "graph"))
        light = page.evaluate(background)
        page.get_by_role("button", name="Dark theme").click()
        assert page.evaluate(background) != light
        page.reload()
        playwright.expect(page.get_by_role("button", name="Light theme")).to_be_visible()
        assert page.evaluate(background) != light


def test_everything_can_be_reached_with_the_keyboard(page: playwright.Page, runs: Path) -> None:
    with site(page, runs) as url:
        page.goto(url)
        page.get_by_role("link", name="first").wait_for()
        page.keyboard.press("Tab")
        playwright.expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        playwright.expect(page.locator("main")).to_be_focused()
        page.get_by_role("link", name="first").focus()
        page.keyboard.press("Enter")
        page.get_by_role("tab", name="Curves").focus()
        page.keyboard.press("ArrowRight")
        playwright.expect(page.get_by_role("tab", name="Graph")).to_have_attribute("aria-selected", "true")
        playwright.expect(page.locator(".counts")).to_contain_text("12 nodes")
        page.locator(".stage").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("aside h2")).to_contain_text("Node 1")
        page.keyboard.press("Escape")
        playwright.expect(page.locator("aside")).to_contain_text("Choose a node")


def test_without_webgl_the_graph_is_drawn_on_a_canvas(page: playwright.Page, runs: Path) -> None:
    page.add_init_script(
        "const get = HTMLCanvasElement.prototype.getContext; HTMLCanvasElement.prototype.getContext ="
        " function (kind, ...rest) { return kind.includes('webgl') ? null : get.call(this, kind, ...rest); };"
    )
    with site(page, runs) as url:
        page.goto(run_url(url, "b", "graph", seed=2))
        playwright.expect(page.locator(".graph")).to_have_attribute("data-renderer", "2D canvas")
        playwright.expect(page.locator(".counts")).to_contain_text("12 nodes")
        page.mouse.click(*top_of_circle(page))
        playwright.expect(page.locator("aside h2")).to_contain_text("Node 0")


def test_a_run_of_an_earlier_version_explains_what_is_missing(page: playwright.Page, tmp_path: Path) -> None:
    WrittenRun(tmp_path / "old", activity=False).finish()
    with site(page, tmp_path) as url:
        page.goto(run_url(url, "old", "graph"))
        playwright.expect(page.locator(".panel")).to_contain_text("do not contain who sent to whom")
        page.get_by_role("tab", name="Timeline").click()
        playwright.expect(page.locator(".panel")).to_contain_text("This run has no timeline")


def test_a_malformed_address_shows_the_list(page: playwright.Page, runs: Path) -> None:
    with site(page, runs) as url:
        page.goto(f"{url}/#/run/%")
        playwright.expect(page.get_by_role("link", name="first")).to_be_visible()


def test_answers_that_fail_are_asked_for_again(page: playwright.Page, runs: Path) -> None:
    failing = {"times": 1}

    def answer(route: playwright.Route) -> None:
        failing["times"] -= 1
        if failing["times"] >= 0:
            route.fulfill(body="not JSON")
        else:
            route.continue_()

    page.route("**/api/layout?*", answer)
    page.route("**/api/runs?*", answer)
    with site(page, runs) as url:
        page.goto(run_url(url, "a", "graph"))
        playwright.expect(page.locator(".graph .empty").first).to_contain_text("could not be read")
        playwright.expect(page.locator(".counts")).to_contain_text("12 nodes")
        playwright.expect(page.locator(".graph .empty").first).to_be_hidden()
        failing["times"] = 1
        page.goto(f"{url}/#/started/{created(3)}")
        playwright.expect(page.locator("#connection")).to_contain_text("Not connected")
        WrittenRun(runs / "c", "third", seed=3).advance(2)
        playwright.expect(page.locator("h1")).to_have_text("third")


def test_the_page_beside_a_run_shows_this_run(page: playwright.Page, tmp_path: Path) -> None:
    WrittenRun(tmp_path / "a", "earlier").advance(2)
    with site(page, tmp_path) as url:
        address = f"{url}/#/started/{created(2)}"
        page.goto(address)
        playwright.expect(page.locator("main")).to_contain_text("Waiting for the run to start")
        page.wait_for_timeout(1500)
        WrittenRun(tmp_path / "b", "this run", seed=2).advance(2)
        playwright.expect(page.locator("h1")).to_have_text("this run")
        page.goto("about:blank")
        WrittenRun(tmp_path / "c", "later", seed=3).advance(2)
        page.goto(address)
        playwright.expect(page.locator("h1")).to_have_text("this run")


def test_the_times_of_the_timeline_are_not_cut_off(page: playwright.Page, tmp_path: Path) -> None:
    WrittenRun(tmp_path / "long", nodes=2, rounds=100).finish()
    page.add_init_script(
        "window.cut = []; window.drawn = 0; const fill = CanvasRenderingContext2D.prototype.fillText;"
        " CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        " if (this.canvas.className === 'timeline' && text.endsWith(' s')) { window.drawn++;"
        " if (x + this.measureText(text).width / 2 > this.canvas.clientWidth + 0.01) window.cut.push(text); }"
        " fill.call(this, text, x, y); };"
    )
    with site(page, tmp_path) as url:
        page.goto(run_url(url, "long", "timeline"))
        playwright.expect(page.locator(".tools .moment")).to_have_text("0.00 s to 100.1 s")
        assert page.evaluate("() => window.drawn") > 0
        assert page.evaluate("() => window.cut") == []


def test_a_server_that_ends_is_reported(browser: playwright.Browser, runs: Path) -> None:
    page = browser.new_page()
    with served(runs) as url:
        page.goto(url)
        page.get_by_role("link", name="first").wait_for()
    playwright.expect(page.locator("#connection")).to_contain_text("Not connected")
    page.close()
