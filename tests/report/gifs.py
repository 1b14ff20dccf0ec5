"""Makes the GIFs of README.md from real runs. Needs Pillow, and for `fleet` Chromium.

    python tests/report/gifs.py policy RUN OUT [--episodes N] [--seconds S] [--seed N] [--fps N] [--width N]
    python tests/report/gifs.py fleet OUT

`policy` plays the best policy of a run. `fleet` trains CartPole with three actors, watches the live page, and kills an
actor. Those of README.md:

    qfleet train LunarLander-v3 run.name=lunar
    python tests/report/gifs.py policy runs/lunar docs/assets/lunar-lander.gif --episodes 3
    qfleet train pong-fast run.name=pong
    python tests/report/gifs.py policy runs/pong docs/assets/pong.gif --seconds 25 --fps 60 --width 160 --seed 1001
    python tests/report/gifs.py fleet docs/assets/fleet.gif

A GIF has at most `LIMIT_BYTES`: frames are left out, then colours, until it is small enough.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/system"), str(ROOT / "tests/report")]

import qfleet  # noqa: E402

LIMIT_BYTES = 780_000
PAGE_WIDTH = 600
PAGE = (1200, 1300)
STRENGTHS = [(2, 64), (3, 64), (3, 32), (4, 32), (4, 16), (6, 16), (8, 16)]
"""Every how many frames one is kept, and the number of colours."""

Images = list[Image.Image]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    policy = kinds.add_parser("policy", help="episodes of the best policy of a run")
    policy.add_argument("run")
    policy.add_argument("out", type=Path)
    policy.add_argument("--episodes", type=int, default=1)
    policy.add_argument("--seconds", type=float, default=20, help="longest length at normal speed (default: 20)")
    policy.add_argument("--seed", type=int, default=1000, help="seed of the episodes (default: 1000)")
    policy.add_argument("--fps", type=float, default=50, help="frames per second of the environment (default: 50)")
    policy.add_argument("--width", type=int, default=320, help="width in pixels (default: 320)")
    policy.set_defaults(make=make_policy)
    fleet = kinds.add_parser("fleet", help="the live page while an actor is killed")
    fleet.add_argument("out", type=Path)
    fleet.set_defaults(make=make_fleet)
    args = parser.parse_args()
    args.make(args)


def make_policy(args: argparse.Namespace) -> None:
    steps = qfleet.rollout(args.run, episodes=args.episodes, seed=args.seed)
    frames = (Image.fromarray(step.frame) for step in steps if step.frame is not None)
    kept = [small(frame, args.width) for frame in islice(frames, round(args.seconds * args.fps))]
    save_small(kept, 1000 / args.fps, args.out)


def make_fleet(args: argparse.Namespace) -> None:
    frames: Images = []
    with tempfile.TemporaryDirectory() as folder:
        for picture in watched_fleet(Path(folder)):
            frames.append(small(Image.open(picture).convert("RGB"), PAGE_WIDTH))
    save(frames, [250] * (len(frames) - 1) + [3000], 256, args.out)
    print(f"{args.out}: {len(frames)} frames, {args.out.stat().st_size:,} bytes")


def watched_fleet(folder: Path) -> Iterator[Path]:
    """Screenshots of the live page: before an actor is killed, while it is down, and when it is back."""
    from chromium_kit import Browser
    from fleet_runs import FleetRun

    from qfleet.report.live_page import LivePageServer
    from qfleet.runs.directory import RunDirectory

    words = ["train", "cartpole", "actors=3", "total_steps=2_000_000", "stop_at=null", "eval.period_steps=2000",
             "eval.episodes=4", "eval.video_period=1", "run.log_period_steps=500", "run.tensorboard=false",
             "run.name=fleet"]
    with Browser() as browser, FleetRun(*words, cwd=folder, run="fleet", PYTHONPATH=str(ROOT)) as run:
        run.until(lambda: len(run.metrics()) > 3)
        server = LivePageServer(RunDirectory(run.run), "127.0.0.1", 0, None)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        browser.screen(*PAGE)
        browser.open(server.url)

        def is_down() -> Any:
            return browser.ask("document.querySelector('tr[data-health=down]') !== null")

        def shots(until: Callable[[], Any], most: int) -> Iterator[Path]:
            for _ in range(most):
                browser.pause(0.5)
                browser.ask("for (const video of document.querySelectorAll('video')) video.controls = false")
                yield browser.picture(folder / "page.png", whole=False)
                if until():
                    return

        yield from shots(lambda: len(run.metrics()) > 30, 24)
        run.kill("actor/1")
        yield from shots(is_down, 40)
        yield from shots(lambda: not is_down(), 60)
        yield from shots(lambda: False, 8)
        server.shutdown()
        server.server_close()


def small(frame: Image.Image, width: int) -> Image.Image:
    """A frame of `width` pixels; sides that are smaller grow by a whole factor, without blur."""
    if frame.width <= width // 2:
        factor = width // frame.width
        return frame.resize((frame.width * factor, frame.height * factor), Image.Resampling.NEAREST)
    return frame.resize((width, round(frame.height * width / frame.width)), Image.Resampling.LANCZOS)


def save_small(frames: Images, step_ms: float, out: Path) -> None:
    """Save at normal speed with as many frames and colours as fit."""
    for every, colours in STRENGTHS:
        kept = frames[::every]
        save(kept, [round(step_ms * every)] * len(kept), colours, out)
        if (size := out.stat().st_size) <= LIMIT_BYTES:
            print(f"{out}: {len(kept)} of {len(frames)} frames, {colours} colours, {size:,} bytes")
            return
    sys.exit(f"{out} has {size:,} bytes, more than {LIMIT_BYTES:,}: choose fewer --seconds or --episodes")


def save(frames: Images, durations_ms: list[int], colours: int, out: Path) -> None:
    """Save with one palette for all frames, so that unchanged parts of a frame cost nothing."""
    sample = Image.new("RGB", (frames[0].width, frames[0].height * 8))
    for number in range(8):
        sample.paste(frames[number * (len(frames) - 1) // 7], (0, number * frames[0].height))
    palette = sample.quantize(colours, method=Image.Quantize.MAXCOVERAGE)  # keeps rare colours, such as that of a fault
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(buffer, format="GIF", save_all=True, append_images=images[1:], loop=0, duration=durations_ms,
                   optimize=True)
    out.write_bytes(buffer.getvalue())


if __name__ == "__main__":
    main()
