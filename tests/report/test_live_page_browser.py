"""The live page in a real browser, also while a real fleet loses an actor."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager

import pytest
from chromium_kit import CHROMIUM, Browser
from fleet_runs import SMALL, FleetRun
from report_kit import records, write_film, write_run

from qfleet.report.live_page import LivePageServer
from qfleet.runs.directory import RunDirectory
from qfleet.runs.lock import LockOwner
from qfleet.runs.membership import write_members
from qfleet.runs.run_log import RunLog

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(180),
              pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
WORDS = [*SMALL, "actors=2", "total_steps=1000000", "eval.period_steps=500", "eval.video_period=1",
         "eval.episodes=1", "env.max_episode_steps=60", "run.name=x"]
ROW = "document.querySelector('tr[data-member=\"{}\"]')"


@contextmanager
def served(folder):
    """The live page of a run, served by a thread."""
    server = LivePageServer(RunDirectory(folder), "127.0.0.1", 0, None)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_shows_a_fleet_that_loses_an_actor(tmp_path):
    with FleetRun("train", "cartpole", *WORDS, cwd=tmp_path) as fleet:
        fleet.until(lambda: len(fleet.metrics()) > 3)
        server = LivePageServer(RunDirectory(fleet.run), "127.0.0.1", 0, "a-token")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            with Browser() as browser:
                browser.screen(1280, 900)
                browser.open(server.url)
                assert browser.ask("location.search") == "", "the token is not left in the address"
                follow(browser, fleet)
                assert browser.complaints == []
                server.shutdown()
                server.server_close()
                browser.sees("!document.getElementById('alarm').hidden")
                assert "does not answer" in browser.ask("document.getElementById('alarm').textContent")
        finally:
            server.shutdown()
            server.server_close()


def test_a_run_of_one_process_that_has_ended(tmp_path):
    rows = [{tag: value for tag, value in row.items() if not tag.startswith("fleet/")} for row in records(1)]
    server = LivePageServer(RunDirectory(write_run(tmp_path, "<b>x", rows=rows)), "127.0.0.1", 0, None)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with Browser() as browser:
            browser.screen(390, 844, "dark")
            browser.open(server.url)
            browser.sees("document.querySelectorAll('path.curve').length > 8")
            text = browser.ask("document.getElementById('page').innerText")
            assert "has ended" in text and "<b>x" in text and "All roles share one process" in text
            assert not any(word in text for word in (" left", "updates/s", "Remedy", "Limited by")), "it is over"
            assert browser.ask("document.documentElement.scrollWidth") == 390 and browser.complaints == []
    finally:
        server.shutdown()
        server.server_close()


def box(what):
    return ("(box => [box.left, box.top, box.right, box.bottom])"
            f"(document.querySelector('{what}').getBoundingClientRect())")


def test_all_of_a_fleet_is_in_sight(tmp_path):
    """The table of roles has the whole width, and where that is too narrow it says that there is more, and scrolls."""
    folder = write_run(tmp_path, "x", rows=[*records(1), {"step": 12_000, "time_s": 37.0, "eval/best_reward": 24.0}])
    (folder / "lock").write_text(f"{LockOwner.current()}\n")
    write_film(folder)
    common = {"host": "worker-17.cluster.example", "pid": 123_456, "incarnation": 1, "steps": 9_000, "version": 4}
    write_members(folder, [common | {"name": name, "role": role} for name, role in (("actor/0", "actor"),
                                                                                    ("evaluator", "evaluator"))])
    spare = "(table => table.scrollWidth - table.clientWidth)(document.querySelector('.scroll.roles'))"
    with served(folder) as server, Browser() as browser:
        browser.screen(1280, 900)
        browser.open(server.url)
        browser.sees(f"{ROW.format('actor/0')} !== null && document.querySelector('video') !== null")
        on_first_screen(browser)
        assert browser.ask(spare) == 0
        _, _, edge, low = browser.ask(box("#members th:last-child"))
        left, _, right, _ = browser.ask(box("#roles"))
        assert edge <= right and right - left > 1100, "no column is cut"
        assert browser.ask(box(".lead"))[3] <= low, "curves and video stand above the roles"
        text = browser.ask(f"{ROW.format('actor/0')}.innerText")
        assert text.startswith("actor/0\t") and text.endswith("worker-17.cluster.example 123456")
        now = browser.ask("[...document.querySelectorAll('#figures dt')].map(each => each.textContent)")
        assert {"eval", "best eval", "samples/insert", "policy lag", "steps/s", "updates/s"} <= set(now)
        assert " · " in browser.ask("document.getElementById('headline').textContent")
        browser.screen(390, 844)
        browser.until(lambda: browser.ask(spare) > 0)
        look = browser.ask("(style => [style.overflowX, style.backgroundImage])"
                           "(getComputedStyle(document.querySelector('.roles')))")
        assert look[0] == "auto" and "gradient" in look[1]
        browser.ask("document.querySelector('.roles').scrollTo(9999, 0)")
        browser.pause(1.5)  # it is drawn anew meanwhile
        assert browser.ask(box("#members th:last-child"))[2] <= 390 and browser.complaints == []


def on_first_screen(browser):
    """Status, speed, remaining time, the learning curve and the video."""
    _, _, right, low = browser.ask(box("#returns figure"))
    left, _, _, end = browser.ask(box("#film video"))
    assert right < left and max(low, end) <= 900
    head = browser.ask("document.querySelector('.status').innerText")
    assert all(word in head for word in ("is running", "12,000 / 12,000 steps", "left", "steps/s")), head


def test_log_and_settings_are_on_the_page(tmp_path):
    folder = write_run(tmp_path, "x")
    record = json.loads((folder / "run.json").read_text())
    record["attempts"][0]["sources"] = {"agent.n_step": "command line", "agent.double": "recipe vector"}
    (folder / "run.json").write_text(json.dumps(record))
    log = RunLog(folder)
    log.write({"step": 6000, "eval/mean_reward": 12.5})
    log.close()
    (folder / "logs" / "actor-0.log").write_text("=== actor/0: start 1 ===\n<b>Traceback\n")
    text = "document.getElementById('{}').innerText"
    with served(folder) as server, Browser() as browser:
        browser.screen(1400, 900)
        browser.open(server.url)
        browser.sees(f"{text.format('log')}.includes('step 6,000: evaluation 12.5')")
        browser.ask("(select => { select.value = 'actor-0'; select.dispatchEvent(new Event('change')); })"
                    "(document.getElementById('log-name'))")
        browser.sees(f"{text.format('log')}.includes('<b>Traceback')")
        assert browser.ask(text.format("changed-settings")) == "agent.n_step\t3\tcommand line"
        browser.ask("document.querySelector('#settings details').open = true")
        assert browser.ask(text.format("other-settings")).startswith("agent.double\ttrue\trecipe vector")
        assert browser.ask("document.querySelectorAll('b').length") == 1 and browser.complaints == []


def test_a_run_of_another_host(tmp_path):
    folder = write_run(tmp_path, "x")
    (folder / "lock").write_text("7.boot-1.some-other-host\n")
    learner = ROW.format("learner")
    with served(folder) as server, Browser() as browser:
        browser.open(server.url)
        browser.sees(f"{learner}?.dataset.health === 'healthy'")
        assert "its files changed" in browser.ask("document.getElementById('state').textContent")
        os.utime(folder / "metrics.jsonl", (1.0, 1.0))
        browser.sees(f"{learner}.dataset.health === 'unknown'")
        assert browser.ask("document.getElementById('state').className") == "state soft"
        assert "unknown" in browser.ask(f"{learner}.innerText") and browser.complaints == []
        # Films that come faster than they can be seen: one is left to play before the next.
        label = "document.querySelector('video').ariaLabel"
        assert browser.ask(f"['a.mp4', 'b.mp4'].map(name => (showVideo(name), {label})) + ''") == "a.mp4,a.mp4"
        browser.sees(f"showVideo('b.mp4'), {label} === 'b.mp4'")  # as there is no a.mp4


def follow(browser, fleet):
    browser.sees("document.querySelectorAll('path.curve').length > 8", 60)
    assert browser.ask("document.getElementById('state').textContent") == "is running"
    browser.sees(f"{ROW.format('actor/1')}?.innerText.includes('steps/s')", 30)
    assert browser.ask(f"{ROW.format('learner')}.innerText").startswith("learner\thealthy\t")
    points = "+document.querySelector('figure[data-tag=\"time/fps\"]').dataset.points"
    before = browser.ask(points)
    browser.sees(f"{points} > {before}", 30)
    browser.sees("document.querySelector('video')?.currentTime > 0.1", 60)

    pid = fleet.kill("actor/1")
    told = "document.getElementById('events').innerText"
    browser.sees(f"{ROW.format('actor/1')}.innerText.includes('killed (SIGKILL), restarting')", 20)
    assert "actor/1 was killed by SIGKILL: perhaps out of memory" in browser.ask(told)
    browser.sees(f"!{ROW.format('actor/1')}.innerText.includes(' {pid}')", 60)
    browser.sees(f"{told}.includes('actor/1 restarted (start 2)')")
    browser.sees("document.querySelector('figure[data-tag=\"fleet/restarts\"] path.curve') !== null", 60)
    restarts = "document.querySelector('figure[data-tag=\"fleet/restarts\"] tbody').textContent"
    assert browser.ask(restarts) == "x0101", "first, last, min, max: there were none, and now there is one"
    assert browser.ask(f"{ROW.format('actor/0')}.dataset.health") == "healthy"
