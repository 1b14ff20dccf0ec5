"""The live page in a real browser, beside a real fleet that loses an actor."""

from __future__ import annotations

import os
import threading

import pytest
from chromium_kit import CHROMIUM, Browser
from fleet_runs import SMALL, FleetRun
from report_kit import records, write_run

from qfleet.runs.directory import RunDirectory
from qfleet.runs.live import Server

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(180),
              pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
WORDS = [*SMALL, "actors=2", "total_steps=1000000", "eval.period_steps=500", "eval.video_period=1",
         "eval.episodes=1", "env.max_episode_steps=60", "run.name=x"]
ROW = "document.querySelector('tr[data-member=\"{}\"]')"


def test_the_page_shows_a_fleet_that_loses_an_actor(tmp_path):
    with FleetRun("train", "cartpole", *WORDS, cwd=tmp_path) as fleet:
        fleet.until(lambda: len(fleet.metrics()) > 3)
        server = Server(RunDirectory(fleet.run), "127.0.0.1", 0, "a-token")
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
    server = Server(RunDirectory(write_run(tmp_path, "<b>x", rows=rows)), "127.0.0.1", 0, None)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with Browser() as browser:
            browser.screen(390, 844, "dark")
            browser.open(server.url)
            browser.sees("document.querySelectorAll('path.curve').length > 8")
            text = browser.ask("document.getElementById('page').innerText")
            assert "has ended" in text and "<b>x" in text and "All roles share one process" in text
            assert browser.ask("document.documentElement.scrollWidth") == 390 and browser.complaints == []
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_of_another_host(tmp_path):
    folder = write_run(tmp_path, "x")
    (folder / "lock").write_text("7.boot-1.some-other-host\n")
    server = Server(RunDirectory(folder), "127.0.0.1", 0, None)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    learner = ROW.format("learner")
    try:
        with Browser() as browser:
            browser.open(server.url)
            browser.sees(f"{learner}?.dataset.health === 'well'")
            assert "its files changed" in browser.ask("document.getElementById('state').textContent")
            os.utime(folder / "metrics.jsonl", (1.0, 1.0))
            browser.sees(f"{learner}.dataset.health === 'unknown'")
            assert browser.ask("document.getElementById('state').className") == "state soft"
            assert "not known" in browser.ask(f"{learner}.innerText") and browser.complaints == []
    finally:
        server.shutdown()
        server.server_close()


def follow(browser, fleet):
    browser.sees("document.querySelectorAll('path.curve').length > 8", 60)
    assert browser.ask("document.getElementById('state').textContent") == "is running"
    browser.sees(f"{ROW.format('local/1')}?.innerText.includes('steps/s')", 30)
    assert browser.ask(f"{ROW.format('learner')}.innerText").startswith("learner\twell\t")
    points = "+document.querySelector('figure[data-tag=\"time/fps\"]').dataset.points"
    before = browser.ask(points)
    browser.sees(f"{points} > {before}", 30)
    browser.sees("document.querySelector('video')?.currentTime > 0.1", 60)

    pid = fleet.kill("local/1")
    browser.sees("document.getElementById('events').innerText.includes('local/1')", 60)
    browser.sees(f"!{ROW.format('local/1')}.innerText.includes(' {pid}')", 60)
    browser.sees("document.getElementById('events').innerText.includes('local/1 came back as another process: life 2')")
    browser.sees("document.querySelector('figure[data-tag=\"fleet/restarts\"] path.curve') !== null", 60)
    assert browser.ask(f"{ROW.format('local/0')}.dataset.health") == "well"
