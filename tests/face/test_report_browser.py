"""The report in a real browser: it renders without a complaint, charts are drawn, films play, in both themes."""

from __future__ import annotations

import pytest
from chromium_kit import CHROMIUM, Browser
from report_kit import EVIL, write_film, write_run

import qfleet
from qfleet.runs.report import report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120),
              pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("reported")
    runs = [write_run(root, f"double-s{seed}", seed) for seed in (1, 2, 3)]
    runs += [write_run(root, "<i>single</i>", 1, gain=0.5, double=False)]
    write_film(runs[0])
    write_film(runs[3], "best-seed1000.mp4")
    return report(runs, root / "report.html")


@pytest.fixture(scope="module")
def browser(page):
    with Browser() as each:
        each.screen(1280, 900)
        each.open(page)
        each.sees("document.querySelectorAll('path.curve').length > 10")
        yield each



def chart(tag, inside=""):
    """JavaScript for something in the chart of a tag."""
    return f"document.querySelector('figure[data-tag=\"{tag}\"] {inside}')"


def lengths(browser, tag):
    return browser.ask(f"[...{chart(tag)}.querySelectorAll('path.curve')].map(line => line.getTotalLength())")



def test_nothing_is_complained_about_and_nothing_is_loaded(browser, page):
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [page.as_uri()]


def test_every_chart_has_its_curves(browser):
    drawn = browser.ask("Object.fromEntries([...document.querySelectorAll('figure[data-tag]')].map(figure => "
                        "[figure.dataset.tag, figure.querySelectorAll('path.curve').length]))")
    expected = {"eval/mean_reward", "rollout/ep_rew_mean", "time/fps", "time/updates_per_s", "train/priority",
                "replay/samples_per_insert", "fleet/policy_lag", "rollout/arm", "replay/beta", "train/loss",
                "fleet/actors"}
    assert expected <= drawn.keys() and set(drawn.values()) == {2}
    for tag in expected - {"fleet/actors"}:
        assert min(lengths(browser, tag)) > 100, tag
    assert browser.ask("document.querySelectorAll('.strip rect').length") >= 4
    assert "configured 8" in browser.ask(f"{chart('replay/samples_per_insert')}.textContent")


def test_a_curve_lies_where_its_figures_are(browser):
    """Mean returns rise from 25 to 96 plus the seed; the band is as high as its seeds are apart."""
    first, last = browser.ask(f"(line => [0, line.getTotalLength()].map(place => line.getPointAtLength(place))"
                              f".map(point => [point.x, point.y]))({chart('rollout/ep_rew_mean', 'path.curve')})")
    assert last[0] - first[0] > 300 and first[1] - last[1] > 150


def test_the_axis_can_be_chosen(browser):
    label = f"{chart('eval/mean_reward', 'svg')}.textContent"
    assert "environment steps" in browser.ask(label)
    axes = (("time", "wall time", "0:20"), ("frames", "frames", "40k"), ("steps", "environment steps", "10k"))
    for value, words, tick in axes:
        browser.ask(f"document.querySelector('input[name=\"x axis\"][value={value}]').click()")
        assert words in browser.ask(label) and tick in browser.ask(label)


def test_a_configuration_can_be_hidden(browser):
    toggle = "document.querySelectorAll('.legend input')[1].click()"
    browser.ask(toggle)
    assert len(lengths(browser, "train/loss")) == 1
    browser.ask(toggle)
    assert len(lengths(browser, "train/loss")) == 2


def test_arrow_keys_read_a_chart(browser):
    picture = chart("train/loss", "svg")
    browser.ask(f"{picture}.focus()")
    for _ in range(3):
        browser.ask(f"{picture}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}}))")
    said = browser.ask(f"{chart('train/loss', '.tip')}.textContent")
    assert "double" in said and "environment steps" in said
    assert "double" in browser.ask(f"{picture}.getAttribute('aria-label')")


def test_films_play(browser):
    browser.ask("document.querySelector('video').scrollIntoView({block: 'center'})")
    assert browser.ask("document.querySelectorAll('video').length") == 2
    browser.sees("document.querySelector('video').currentTime > 0.2")
    shown = browser.ask("(video => [video.error, video.paused, video.videoWidth, video.muted])"
                        "(document.querySelector('video'))")
    assert shown == [None, False, 480, True]


def test_scores_and_differences_are_in_their_tables(browser):
    scores = browser.ask("document.getElementById('score-table').innerText")
    assert "double (3 seeds)" in scores and "25 to 27" in scores and "132 %" in scores and "one seed" in scores
    rows = "[...document.querySelectorAll('#config-table tbody tr')].map(row => row.innerText)"
    assert browser.ask(rows) == ["agent.double\tTrue\tFalse"]
    browser.ask("document.querySelector('#configuration ~ p input[type=checkbox]').click()")
    assert any(EVIL in row for row in browser.ask(rows))
    assert browser.ask("document.querySelectorAll('tr.differs').length") == 1


def test_names_are_shown_as_they_are(browser):
    assert browser.ask("document.querySelectorAll('i, img').length") == 0
    assert "<i>single</i>" in browser.ask("document.body.innerText") and browser.ask("document.title") == "ALE/Pong-v5"


def test_light_and_dark(browser, page):
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark"):
        browser.screen(1280, 900, theme)
        seen[theme] = browser.ask(ground)
    assert seen == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 20, 24)"}
    browser.screen(1280, 900, "dark")
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask(ground) == seen["light"], "the button goes before what the system prefers"


def test_a_telephone_is_wide_enough(browser, page, tmp_path):
    browser.screen(390, 844)
    browser.open(page)
    browser.sees("document.querySelectorAll('path.curve').length > 10")
    assert browser.ask("document.documentElement.scrollWidth") == 390 and browser.complaints == []
    assert browser.picture(tmp_path / "telephone.png", whole=False).stat().st_size > 10_000


def test_a_real_run_of_arms_and_priorities_has_its_charts(browser, tmp_path):
    words = ["env.kwargs={size: 4, mapping_seed: 1}", "agent.memory=none", "replay.alpha=0.6", "replay.min_steps=200",
             "total_steps=6000", "eval.period_steps=2000", "eval.episodes=2", "run.log_period_steps=400",
             "run.tensorboard=false", f"run.root={tmp_path}", "run.name=arms", "run.threads=1"]
    browser.open(report([qfleet.train("deep-sea", words).directory]))
    browser.sees("document.querySelectorAll('path.curve').length > 10")
    for tag in ("rollout/arm", "train/priority", "replay/beta", "rollout/exploration_rate", "train/loss"):
        assert min(lengths(browser, tag)) > 30, tag
    assert browser.complaints == []


ODD = {"one record": [{"step": 1, "time_s": 1.0}],
       "no clock": [{"step": 1, "train/loss": 3.0}, {"step": 2, "eval/mean_reward": -3.0, "train/loss": None}],
       "extremes": [{"step": i, "time_s": 0.0, "eval/mean_reward": 1e12 * i, "train/loss": 1e-12 * i} for i in (0, 1)]}


@pytest.mark.parametrize("name", ODD)
def test_runs_with_hardly_a_figure_make_a_page_all_the_same(browser, tmp_path, name):
    browser.open(report([write_run(tmp_path, "x", rows=ODD[name])]))
    browser.sees("document.getElementById('config-table') !== null")
    browser.ask("document.querySelector('input[value=time]').click()")
    broken = "[...document.querySelectorAll('svg path')].some(line => line.getAttribute('d').includes('NaN'))"
    assert browser.complaints == [] and browser.ask(broken) is False
