"""Makes the pictures of `docs/report.md`: trains a few short runs and looks at their pages with Chromium.

    python tests/report/screenshots.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/system")]

from chromium_kit import Browser  # noqa: E402
from fleet_runs import FleetRun  # noqa: E402

import qfleet  # noqa: E402
from qfleet.report.live_page import LivePageServer  # noqa: E402
from qfleet.report.run_report import report  # noqa: E402
from qfleet.runs.directory import RunDirectory  # noqa: E402

PICTURES = ROOT / "docs/assets"
SEEDS = 3
SHORT = ["total_steps=9000", "stop_at=null", "eval.period_steps=1500", "eval.episodes=4", "run.log_period_steps=300",
         "run.tensorboard=false", "run.threads=1"]
COMPARED = {"one-step": ["agent.n_step=1"], "five-step": ["agent.n_step=5"]}
FLEET = ["actors=2", "total_steps=400000", "stop_at=null", "eval.period_steps=2000",
         "eval.episodes=2", "eval.video_period=1", "run.tensorboard=false", "run.log_period_steps=500",
         "run.name=fleet"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        of_report(browser, Path(folder))
        of_watch(browser, Path(folder))


def of_report(browser: Browser, folder: Path) -> None:
    """Two configurations of three seeds each."""
    runs = [qfleet.train("cartpole", [*SHORT, *words, f"seed={seed}", f"run.root={folder}", f"run.name={name}-s{seed}"])
            for name, words in COMPARED.items() for seed in range(1, SEEDS + 1)]
    browser.screen(1280, 1100)
    browser.open(report([run.directory for run in runs], folder / "report.html"))
    browser.sees("document.querySelectorAll('path.curve').length > 10")
    browser.picture(PICTURES / "report.png", whole=False)


def of_watch(browser: Browser, folder: Path) -> None:
    """A fleet that has just lost an actor."""
    with FleetRun("train", "cartpole", *FLEET, cwd=folder, run="fleet", PYTHONPATH=str(ROOT)) as fleet:
        fleet.until(lambda: len(fleet.metrics()) > 3)
        server = LivePageServer(RunDirectory(fleet.run), "127.0.0.1", 0, None)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        browser.screen(1280, 1010)
        browser.open(server.url)
        browser.sees("document.querySelector('video')?.currentTime > 0.1 && "
                     "document.querySelectorAll('figure[data-tag=\"eval/mean_reward\"] circle').length > 4", 120)
        browser.ask("document.querySelector('video').controls = false")
        fleet.kill("actor/1")
        browser.sees("document.querySelector('tr[data-health=down]') !== null")
        browser.pause(0.5)
        browser.picture(PICTURES / "watch.png", whole=False)
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
