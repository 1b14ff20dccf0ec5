"""Verbs that show a trained agent: `eval`, `record`, `play`, `plot` and `export`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qfleet.cli.output import clean_stdout, print_result, progress_counter

if TYPE_CHECKING:
    import numpy as np

    from qfleet.api import EvalResult
    from qfleet.runs.find import Which


def evaluate(args: Namespace) -> int:
    """Play whole episodes and report."""
    from qfleet import api

    with clean_stdout(args), progress_counter("episodes", args.episodes) as told:
        result = api.evaluate(args.words[0], episodes=args.episodes, seed=args.seed, epsilon=args.epsilon,
                              which=args.which, lanes=args.lanes, device=args.device, root=args.root, trust=args.trust,
                              on_episode=told)
    print_result(args, [describe_result(result), f"checkpoint {result.checkpoint}"], result.to_json())
    return 0


def record(args: Namespace) -> int:
    """Film some episodes."""
    path = Path(args.out) if args.out else video_path(args.words[0], args.which, args.seed, args.root)
    if args.gif and not args.out:
        path = path.with_suffix(".gif")
    reel = RolloutFrames(args.words[0], args.episodes, args.seed, args.which, args.trust, args.root)
    with clean_stdout(args):
        pictures = write_video(reel, path, args.fps)
    print_result(args, [f"{pictures} pictures, returns of the episodes: {_listed(reel.returns)}", str(path)],
                 {"path": str(path), "pictures": pictures, "episodes": len(reel.returns), "returns": reel.returns})
    return 0


def play(args: Namespace) -> int:
    """Watch some episodes in a window."""
    from qfleet.report import video

    reel = RolloutFrames(args.words[0], args.episodes, args.seed, args.which, args.trust, args.root)
    with clean_stdout(args):
        video.show(reel.frames(), f"qfleet: {args.words[0]}", args.fps)
    print_result(args, [f"returns {_listed(reel.returns)}"], {"episodes": len(reel.returns), "returns": reel.returns})
    return 0


def plot(args: Namespace) -> int:
    """Draw learning curves."""
    from qfleet.report import plots
    from qfleet.runs.directory import RunDirectory

    runs = [RunDirectory.open(word, args.root).path for word in args.words]
    path = plots.plot(runs, args.x, args.y, args.smooth, args.out)
    print_result(args, [str(path)], {"path": str(path), "runs": [str(run) for run in runs]})
    return 0


def export(args: Namespace) -> int:
    """Write the policy alone."""
    from qfleet import api

    path = api.export(args.words[0], args.words[1], args.which, root=args.root)
    print_result(args, [str(path)], {"path": str(path)})
    return 0


class RolloutFrames:
    """The pictures of some episodes, one after the other, and the returns of those that ended."""

    def __init__(self, path: str | Path, episodes: int, seed: int, which: Which, trust: bool,
                 root: str | Path = "runs") -> None:
        self.path, self.episodes, self.seed, self.which, self.trust = path, episodes, seed, which, trust
        self.root = root
        self.returns: list[float] = []

    def frames(self) -> Iterator[np.ndarray]:
        from qfleet import api

        total = 0.0
        steps = api.rollout(self.path, episodes=self.episodes, seed=self.seed, which=self.which, root=self.root,
                            trust=self.trust)
        for step in steps:
            total += step.reward
            if step.frame is not None:
                yield step.frame
            if step.done:
                self.returns.append(total)
                total = 0.0


def write_video(reel: RolloutFrames, path: Path, fps: float) -> int:
    """Write the film by its ending, counting aloud on a terminal since long episodes take their time."""
    from qfleet.report import video

    video.without_display()
    write = video.write_gif if path.suffix.lower() == ".gif" else video.write_mp4
    with progress_counter("pictures", period=100) as count:
        return write(reel.frames(), path, fps, count)


def video_path(where: str | Path, which: str, seed: int, root: str | Path = "runs") -> Path:
    """Films lie in their run; those of a checkpoint that belongs to no run lie beside it."""
    from qfleet.runs.checkpoint import is_checkpoint
    from qfleet.runs.directory import RunDirectory

    if not is_checkpoint(where):
        return RunDirectory.open(where, root).videos / f"{which}-seed{seed}.mp4"
    checkpoint = Path(where).expanduser().resolve()
    run = checkpoint.parent.parent
    folder = run / "videos" if (run / "run.json").is_file() else checkpoint.parent
    return folder / f"{checkpoint.name}-seed{seed}.mp4"


def describe_result(result: EvalResult) -> str:
    how = "greedy" if result.epsilon == 0 else f"ε = {result.epsilon:g}"
    episodes = f"{result.episodes} episode{'s' * (result.episodes != 1)}"
    return (f"mean return {result.mean_reward:.2f} ± {result.std_reward:.2f} over {episodes} "
            f"({how}, {result.protocol}, seed {result.seed})")


def _listed(returns: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in returns) or "none, no episode ended"
