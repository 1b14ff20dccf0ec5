"""Charts of the report in a real browser: zoom, filter, downloads, many configurations, constant metrics."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET

import pytest
from chromium_kit import CHROMIUM, Browser
from report_kit import write_film, write_run

from qfleet.report.run_report import gather, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120),
              pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

CONFIGURATIONS = 12
TAG = "rollout/ep_rew_mean"


def write_sweep(root, count=CONFIGURATIONS, seeds=(1, 2)):
    """Runs of `count` configurations, which differ in agent.n_step."""
    folders = []
    for index in range(1, count + 1):
        for seed in seeds:
            folder = write_run(root, f"run{index}-s{seed}", seed, gain=index / 10, env="LunarLander-v3")
            settings = json.loads((folder / "config.yaml").read_text())
            settings["agent"]["n_step"] = index
            (folder / "config.yaml").write_text(json.dumps(settings))
            folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = write_sweep(tmp_path_factory.mktemp("sweep"))
    write_film(made[3], "best-seed1000.mp4")
    write_film(made[-1])
    return made


@pytest.fixture(scope="module")
def page(folders):
    return report(folders, folders[0].parent / "report.html")


@pytest.fixture(scope="module")
def chromium():
    with Browser() as each:
        yield each


@pytest.fixture
def browser(chromium, page):
    chromium.screen(1400, 900)
    chromium.open(page)
    chromium.sees("document.querySelectorAll('path.curve').length > 10")
    yield chromium
    assert chromium.complaints == []


def figure(tag=TAG, inside=""):
    return f"document.querySelector('figure[data-tag=\"{tag}\"] {inside}')"


def curves(browser, tag=TAG):
    return browser.ask(f"{figure(tag)}.querySelectorAll('path.curve').length")


def axis_texts(browser, tag=TAG):
    return browser.ask(f"[...{figure(tag)}.querySelectorAll('.xtick')].map(each => each.textContent)")


def frame_of(browser, tag):
    """Left and top of a chart, and its width, once it is on the screen."""
    browser.ask(f"{figure(tag, 'svg')}.scrollIntoView({{block: 'center'}})")
    return browser.ask(f"(box => [box.left, box.top, box.width])({figure(tag, 'svg')}.getBoundingClientRect())")


def drag(browser, start, end, tag=TAG):
    """Drag across a chart; places are fractions of its width."""
    left, top, width = frame_of(browser, tag)
    places = [left + width * (start + (end - start) * part) for part in (0, 0.5, 1)]
    mouse = {"button": "left", "buttons": 1, "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=places[0], y=top + 60, **mouse)
    for place in places[1:]:
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place, y=top + 60, button="left", buttons=1)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=places[-1], y=top + 60, **mouse)


def type_filter(browser, text):
    browser.ask(f"(box => {{ box.value = {text!r}; box.dispatchEvent(new Event('input')); }})"
                "(document.getElementById('filter'))")


def saved(browser, button, tag=TAG):
    """Name and content of the file that a button downloads."""
    return browser.ask("(async () => { let blob, name;"
                       "const make = URL.createObjectURL, click = HTMLAnchorElement.prototype.click;"
                       "URL.createObjectURL = each => { blob = each; return make.call(URL, each); };"
                       "HTMLAnchorElement.prototype.click = function () { name = this.download; };"
                       f"[...{figure(tag)}.querySelectorAll('.export')]"
                       f".find(each => each.textContent === '{button}').click();"
                       "URL.createObjectURL = make; HTMLAnchorElement.prototype.click = click;"
                       "return [name, await blob.text()]; })()")


def test_the_learning_curve_and_the_video_of_the_best_run_are_on_the_first_screen(browser):
    boxes = browser.ask("['.lead figure[data-tag]', '.lead video'].map(what => document.querySelector(what)"
                        ".getBoundingClientRect()).map(box => [box.left, box.top, box.right, box.bottom])")
    chart, video = boxes
    assert chart[2] <= video[0] and max(chart[3], video[3]) <= 900
    assert browser.ask("document.querySelector('.lead figcaption').textContent").startswith("run12-s2")
    assert browser.ask("document.querySelectorAll('video').length") == 2, "no video is shown twice"


def test_configurations_look_different_and_stand_in_natural_order(browser, folders):
    labels = [f"run{index} (2 seeds)" for index in range(1, CONFIGURATIONS + 1)]
    assert [group["label"] for group in gather([*folders[::-1]])[0]["groups"]] == labels
    for where in (".legend label", "#score-table tbody th", "#config-table tbody th"):
        assert browser.ask(f"[...document.querySelectorAll('{where}')].map(each => each.textContent.trim())") == labels
    looks = browser.ask(f"[...{figure()}.querySelectorAll('path.curve')].map(line => line.getAttribute('stroke') + "
                        "line.getAttribute('stroke-dasharray'))")
    markers = browser.ask("[...document.querySelectorAll('.legend .marker')].map(each => each.getAttribute('d'))")
    assert len(set(looks)) == CONFIGURATIONS and len(set(markers[:8])) == 8, "without colours, markers differ"
    assert browser.ask("new Set([...Array(48).keys()].map(i => colour(i) + dashes(i) + markerOf(i))).size") == 48


def test_a_filter_hides_configurations_in_charts_and_tables(browser):
    rows = "[...document.querySelectorAll('{} tbody tr')].filter(row => row.checkVisibility()).length"
    type_filter(browser, "N_STEP=1")  # 1, 10, 11, 12
    assert curves(browser) == 4 and browser.ask(rows.format("#score-table")) == 4
    assert browser.ask(rows.format("#config-table")) == 4
    assert browser.ask("[...document.querySelectorAll('.origin')].filter(each => each.checkVisibility()).length") == 8
    type_filter(browser, "run nothing")
    assert curves(browser) == 0
    assert "no configuration matches" in browser.ask("document.querySelector('.controls').innerText")
    type_filter(browser, "")
    click = "[...document.querySelectorAll('.filter button')].find(each => each.textContent === '{}').click()"
    browser.ask(click.format("None"))
    browser.ask("document.querySelectorAll('.legend input')[2].click()")
    assert curves(browser) == 1 and browser.ask(rows.format("#score-table")) == 1
    browser.ask(click.format("All"))
    assert curves(browser) == CONFIGURATIONS == browser.ask(rows.format("#score-table"))


def test_dragging_zooms_all_charts_and_a_double_click_shows_everything(browser):
    before, other = axis_texts(browser), axis_texts(browser, "train/loss")
    assert browser.ask("document.querySelector('.unzoom').hidden")
    drag(browser, 0.4, 0.6)
    low, high = browser.ask("view.range")
    assert 3500 < low < high < 8000 and axis_texts(browser) != before and axis_texts(browser, "train/loss") != other
    inside = browser.ask(f"(line => [line.getBBox().x, line.getBBox().width])({figure(TAG, 'path.curve')})")
    assert inside[0] > 20 and inside[1] > 300, "the part fills the chart"
    rising = browser.ask(f"[...{figure()}.querySelector('tbody tr').children].map(each => each.textContent)")
    assert float(rising[3]) > 1.5, "the table of values is that of the zoomed range"
    browser.ask(f"{figure(TAG, '.plot')}.dispatchEvent(new MouseEvent('dblclick', {{bubbles: true}}))")
    assert axis_texts(browser) == before and browser.ask("view.range") is None


def test_the_keyboard_zooms_too(browser):
    before = axis_texts(browser)
    press = f"{figure(TAG, 'svg')}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{{}}'}}))"
    browser.ask(press.replace("{}", "+"))
    assert axis_texts(browser) != before and not browser.ask("document.querySelector('.unzoom').hidden")
    browser.ask("document.querySelector('.unzoom').click()")
    assert axis_texts(browser) == before
    browser.ask(press.replace("{}", "+"))
    browser.ask(press.replace("{}", "0"))
    assert axis_texts(browser) == before
    browser.ask("zoom([500, 3500])")  # evaluations begin at 3000, beyond the middle
    browser.ask(press.replace(TAG, "eval/mean_reward").replace("{}", "+"))
    assert browser.ask("view.range") == [3000, 3750], "the zoom stays on the data of the chart"
    browser.ask("zoom(null)")
    focusable = browser.ask("[...document.querySelectorAll('.export, .unzoom, #filter, .legend input, .plot svg')]"
                            ".every(each => each.tabIndex === 0)")
    assert focusable, "every control can be reached with the tabulator key"


def test_a_drag_ends_if_the_button_was_released_unseen(browser):
    """The live page redraws charts during a drag, so that a release outside of the chart is not reported."""
    left, top, width = frame_of(browser, TAG)
    mouse = {"button": "left", "clickCount": 1, "y": top + 60}
    band = f"{figure(TAG, '.selected')}.getAttribute('visibility')"
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=left + width * 0.3, buttons=1, **mouse)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 0.4, buttons=1, **mouse)
    assert browser.ask(band) == "visible"
    browser.ask("redraw()")
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=5, buttons=0, **mouse)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 0.6, y=top + 60)
    assert browser.ask(band) == "hidden" and browser.ask("view.range") is None


def test_a_touch_drags_as_a_mouse_does(browser):
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    left, top, width = frame_of(browser, TAG)
    for kind, share in (("touchStart", 0.3), ("touchMove", 0.4), ("touchMove", 0.7), ("touchEnd", None)):
        browser.call("Input.dispatchTouchEvent", type=kind,
                     touchPoints=[] if share is None else [{"x": left + width * share, "y": top + 60}])
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    browser.sees("view.range !== null")


def test_a_chart_is_downloaded_as_csv(browser):
    name, text = saved(browser, "CSV")
    rows = list(csv.reader(io.StringIO(text)))
    assert name == "return-while-training.csv"
    assert rows[0] == ["configuration", "run", "environment steps", "Return while training (reward)"]
    assert len(rows) == 1 + 24 * 2 * CONFIGURATIONS and rows[1] == ["run1 (2 seeds)", "run1-s1", "500", "1.4"]
    type_filter(browser, "run12")
    browser.ask("zoom([500, 1000])")
    assert len(list(csv.reader(io.StringIO(saved(browser, "CSV")[1])))) == 1 + 2 * 2, "what is shown is saved"


def test_a_chart_is_downloaded_as_svg(browser):
    name, text = saved(browser, "SVG")
    picture = ET.fromstring(text)
    assert name == "return-while-training.svg" and picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(--" not in text and "Return while training" in text and "run12 (2 seeds)" in text
    assert len([each for each in picture.iter() if each.get("class") == "curve"]) == CONFIGURATIONS


def test_metrics_that_never_change_are_folded(browser):
    assert browser.ask(figure("fleet/actors")) is None and browser.ask(figure("replay/bytes")) is None
    assert browser.ask("document.getElementById('constants').open") is False
    browser.ask("document.getElementById('constants').open = true")
    row = "document.querySelector('[data-constant=\"{}\"]').innerText"
    assert browser.ask(row.format("fleet/actors")) == "Actors alive\tfleet/actors\t2"
    assert browser.ask(row.format("replay/bytes")).endswith("\t1M")


OUTSIDE = """[...document.querySelectorAll('h1, h2, h3, p, button, input, select, summary, figcaption, .tile b')]
  .filter(each => each.checkVisibility() && !each.closest('.scroll, .choice'))
  .filter(each => { const box = each.getBoundingClientRect(); return box.right > innerWidth + 1 || box.left < 0; })
  .map(each => each.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_cut_off(browser, width, theme):
    browser.screen(width, 900, theme)
    browser.pause(0.3)
    assert browser.ask("document.documentElement.scrollWidth") == width
    outside = browser.ask(OUTSIDE)
    assert outside == []
