"""The report in a real browser: it renders without a complaint, charts are drawn, films play, in both themes."""

from __future__ import annotations

import pytest
from chromium_kit import CHROMIUM, Browser
from report_kit import EVIL, limited, records, scattered, write_film, write_run

import qfleet
from qfleet.report.run_report import report

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
                "replay/samples_per_insert", "fleet/policy_lag", "rollout/arm", "replay/beta", "train/loss"}
    assert expected <= drawn.keys() and set(drawn.values()) == {2}
    for tag in expected:
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
    browser.sees("(video => !video.paused && video.currentTime > 0.2)(document.querySelector('video'))")
    shown = browser.ask("(video => [video.error, video.paused, video.videoWidth, video.muted])"
                        "(document.querySelector('video'))")
    assert shown == [None, False, 480, True]


def test_scores_and_differences_are_in_their_tables(browser):
    scores = browser.ask("document.getElementById('score-table').innerText")
    assert "few seeds" in scores and "too narrow to trust" in browser.ask("document.body.innerText")
    scales = browser.ask("[...document.querySelectorAll('.whisker')].map(each => each.querySelectorAll('text').length)")
    assert len(scales) == 2 and min(scales) >= 2, "the intervals have a scale"
    assert "double (3 seeds)" in scores and "25 to 27" in scores and "132 %" in scores and "one seed" in scores
    rows = "[...document.querySelectorAll('#config-table tbody tr')].map(row => row.innerText)"
    assert browser.ask(rows) == ["agent.double\ttrue\tfalse"]
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
    assert browser.ask("(table => table.scrollWidth <= table.parentNode.clientWidth)"
                       "(document.getElementById('score-table'))")
    assert browser.picture(tmp_path / "telephone.png", whole=False).stat().st_size > 10_000


def test_a_real_run_of_arms_and_priorities_has_its_charts(browser, tmp_path):
    words = ["env.kwargs={size: 4, mapping_seed: 1}", "agent.memory=none", "replay.alpha=0.6", "replay.min_steps=200",
             "total_steps=6000", "eval.period_steps=2000", "eval.episodes=2", "run.log_period_steps=400",
             "run.tensorboard=false", f"run.root={tmp_path}", "run.name=arms", "run.threads=1"]
    browser.open(report([qfleet.train("deep-sea", words).directory]))
    browser.sees("document.querySelectorAll('path.curve').length > 10")
    for tag in ("rollout/arm", "train/priority", "replay/beta", "train/loss"):
        assert min(lengths(browser, tag)) > 30, tag
    assert browser.ask("document.querySelector('[data-constant=\"rollout/exploration_rate\"]') !== null")
    arms, share = browser.ask("(rects => [new Set(rects.map(each => each.dataset.arm)).size, "
                              "rects.reduce((sum, each) => sum + each.width.baseVal.value * each.dataset.share, 0)])"
                              "([...document.querySelectorAll('.arms rect')])")
    end = browser.ask("Math.max(...[...document.querySelectorAll('.arms rect')].map(each => "
                      "each.x.baseVal.value + each.width.baseVal.value))")
    assert arms == 4 and 800 < end < 1000.1 and share == pytest.approx(end, rel=0.01), "at any time all shares are 1"
    assert "Followed most at the end: arm" in browser.ask("document.querySelector('.arms').innerText")
    assert browser.complaints == []


SEEDS_OUTSIDE = """(chart => {
  const read = path => [...path.getAttribute('d').matchAll(/[ML]([-\\d.]+) ([-\\d.]+)/g)].map(([, x, y]) => [+x, +y]);
  const ring = read(chart.querySelector('.band')), half = ring.length / 2;
  const high = ring.slice(0, half), low = ring.slice(half).reverse();
  const at = (line, x) => { const i = line.findIndex(([px]) => px >= x), [a, b] = [line[Math.max(0, i - 1)], line[i]];
    return b[0] === a[0] ? b[1] : a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]); };
  return [...chart.querySelectorAll('.seed')].flatMap(read).filter(([x]) => x >= high[0][0] && x <= high.at(-1)[0])
    .filter(([x, y]) => y < at(high, x) - 1 || y > at(low, x) + 1).length; })"""


def drawn(browser, tag, part):
    return browser.ask(f"{chart(tag, part)}.getAttribute('d')")


def smooth(browser, width):
    browser.ask(f"(select => {{ select.value = {width}; select.dispatchEvent(new Event('change')); }})"
                "(document.getElementById('smoothing'))")


def test_a_band_holds_its_seeds_and_only_what_scatters_is_smoothed(browser, tmp_path):
    browser.screen(1280, 900)
    browser.open(report([write_run(tmp_path, f"x-s{seed}", seed, rows=scattered(seed)) for seed in (1, 2, 3)]))
    browser.sees("document.querySelectorAll('path.band').length > 2")
    assert browser.ask("document.getElementById('smoothing').value") == "1", "nothing is smoothed unasked"
    returns, schedule, count = "rollout/ep_rew_mean", "rollout/exploration_rate", "replay/clamped_priorities"
    before = {tag: drawn(browser, tag, ".curve") for tag in (returns, schedule, count)}
    band = drawn(browser, returns, ".band")
    for width in (1, 15):
        smooth(browser, width)
        assert browser.ask(f"{SEEDS_OUTSIDE}({chart(returns)})") == 0
    assert drawn(browser, returns, ".band") == band and drawn(browser, returns, ".curve") != before[returns]
    assert "mean of 15 points" in browser.ask(f"{chart(returns, 'h3')}.textContent")
    assert [drawn(browser, tag, ".curve") for tag in (schedule, count)] == [before[schedule], before[count]]
    assert "Thin lines are single seeds" in browser.ask("document.body.innerText") and browser.complaints == []


def test_shares_of_what_limited_a_run_are_those_of_the_chosen_axis(browser, tmp_path):
    browser.open(report([write_run(tmp_path, "x", rows=limited())]))
    browser.sees("document.querySelectorAll('.strip rect').length > 1")
    told = "[...document.querySelectorAll('.shares > span')].map(each => each.textContent.trim())"
    wide = ("[...document.querySelectorAll('.strip rect')].reduce((sums, part) => ({...sums, [part.dataset.limit]: "
            "(sums[part.dataset.limit] || 0) + part.width.baseVal.value}), {})")
    seen = {}
    for axis in ("steps", "time"):
        browser.ask(f"document.querySelector('input[name=\"x axis\"][value={axis}]').click()")
        spans = browser.ask(wide)
        seen[axis] = sorted(browser.ask(told))
        total = sum(spans.values())
        assert seen[axis] == sorted(f"{name} {round(100 * span / total)} %" for name, span in spans.items())
        assert browser.ask("document.querySelectorAll('.scale span').length") >= 3
    assert seen["steps"] != seen["time"]
    taken = ("[...Array(8).keys()].map(i => { const probe = document.createElement('i'); document.body.append(probe);"
             "probe.style.color = `var(--c${i})`; return getComputedStyle(probe).color; })")
    fills = browser.ask("[...document.querySelectorAll('.strip rect')].map(part => getComputedStyle(part).fill)")
    assert not set(fills) & set(browser.ask(taken)), "no limit looks like a configuration"


def test_one_process_with_uniform_replay_has_no_fleet_and_no_priorities(browser, tmp_path):
    rows = [{tag: value for tag, value in row.items() if not tag.startswith("fleet/")} | {"actor/policy_lag": 3.0}
            for row in records(1)]
    run = write_run(tmp_path, "x", rows=rows)
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace('"samples_per_insert"', '"alpha": 0.0, "samples_per_insert"'))
    browser.open(report([run]))
    browser.sees("document.querySelectorAll('path.curve').length > 8")
    titles = browser.ask("[...document.querySelectorAll('h2')].map(each => each.textContent)")
    assert "Fleet" not in titles and {"Videos", "Any metric", "Provenance"} - {*titles} == {"Videos"}
    assert browser.ask(f"{chart('train/priority')}") is None and browser.ask(f"{chart('train/loss')} !== null")
    assert browser.ask("document.querySelector('details #config-table').checkVisibility()") is False, "it is folded"


def test_ticks_of_an_axis_have_one_form(browser):
    forms = browser.ask("[[0, 10000, 5], [0, .001, 4], [0, 2.1, 2], [0, 4e-7, 3], [990, 1010, 4], [0, 95, 4, true]]"
                        ".map(span => ticks(...span).map(([, text]) => text).join(' '))")
    assert forms == ["0 2k 4k 6k 8k 10k", "0 0.00025 0.00050 0.00075 0.00100", "0 2", "0 2.0e-7 4.0e-7",
                     "990 995 1,000 1,005 1,010", "0:00 0:30 1:00 1:30"]


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
