"""Makes the pictures of `docs/report.md`: trains short runs and takes screenshots of their pages with Chromium.

    python tests/report/screenshots.py [report|watch]... [--runs DIR]

With `--runs` the runs of the report are kept in DIR, and those that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/system")]

from chromium_kit import Browser  # noqa: E402
from fleet_runs import FleetRun  # noqa: E402

import qfleet  # noqa: E402
from qfleet.cli.commands import main as qfleet_command  # noqa: E402
from qfleet.report.live_page import LivePageServer  # noqa: E402
from qfleet.report.run_report import report  # noqa: E402
from qfleet.runs.directory import RunDirectory  # noqa: E402

PICTURES = ROOT / "docs/assets"
SCREEN = (1400, 900)
SEEDS = (1, 2, 3)
COMMON = ["total_steps=18000", "stop_at=null", "eval.period_steps=1500", "eval.episodes=5", "run.threads=1"]
COMPARED = {"3-step": ["agent.n_step=3"], "5-step": ["agent.n_step=5"],
            "dueling": ["agent.n_step=3", "agent.dueling=true"]}
FLEET = ["actors=2", "total_steps=400000", "stop_at=null", "eval.period_steps=2000",
         "eval.episodes=2", "eval.video_period=1", "run.tensorboard=false", "run.log_period_steps=500",
         "run.name=fleet"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", metavar="report|watch")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    args = parser.parse_args()
    wanted = args.pictures or ["report", "watch"]
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        browser.screen(*SCREEN)
        if "report" in wanted:
            of_report(browser, args.runs or Path(folder))
        if "watch" in wanted:
            of_watch(browser, Path(folder))


def of_report(browser: Browser, folder: Path) -> None:
    """Three configurations of three seeds each, with a video of each run's best policy."""
    runs = [train(folder, f"{name}-s{seed}", [*words, f"seed={seed}"])
            for seed in SEEDS for name, words in COMPARED.items()]
    browser.open(report(runs, folder / "report.html"))
    browser.sees("document.querySelectorAll('path.curve').length > 10")
    browser.sees("document.querySelector('.lead video').currentTime > 1")
    browser.ask("document.querySelector('.lead video').controls = false")
    browser.picture(PICTURES / "report.png", whole=False)


def train(folder: Path, name: str, words: list[str]) -> Path:
    run = folder / name
    if not run.exists():
        qfleet.train("cartpole", [*COMMON, *words, f"run.root={folder}", f"run.name={name}"])
    if not list(run.glob("videos/best-*.mp4")):
        assert qfleet_command(["record", str(run)]) == 0
    return run


def of_watch(browser: Browser, folder: Path) -> None:
    """A fleet that has just lost an actor."""
    with FleetRun("train", "cartpole", *FLEET, cwd=folder, run="fleet", PYTHONPATH=str(ROOT)) as fleet:
        fleet.until(lambda: len(fleet.metrics()) > 3)
        server = LivePageServer(RunDirectory(fleet.run), "127.0.0.1", 0, None)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        browser.open(server.url)
        browser.sees("document.querySelector('video')?.currentTime > 0.1 && "
                     "document.querySelectorAll('figure[data-tag=\"eval/mean_reward\"] circle').length > 4", 240)
        browser.ask("document.querySelector('video').controls = false")
        fleet.kill("actor/1")
        browser.sees("document.querySelector('tr[data-health=down]') !== null")
        browser.screen(SCREEN[0], 1130)  # down to the table of roles
        browser.pause(0.7)
        browser.picture(PICTURES / "watch.png", whole=False)
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
