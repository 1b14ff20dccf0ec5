"""Commands for trained agents: `eval`, `record`, `play`, `plot` and `export`."""

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
    """Evaluate full episodes and print the mean return."""
    from qfleet import api

    with clean_stdout(args), progress_counter("episodes", args.episodes) as count:
        result = api.evaluate(args.words[0], episodes=args.episodes, seed=args.seed, epsilon=args.epsilon,
                              which=args.which, lanes=args.lanes, device=args.device, root=args.root, trust=args.trust,
                              on_episode=count)
    print_result(args, [describe_result(result), f"checkpoint {result.checkpoint}"], result.to_json())
    return 0


def record(args: Namespace) -> int:
    """Record episodes as a video."""
    path = Path(args.out) if args.out else video_path(args.words[0], args.which, args.seed, args.root)
    if args.gif and not args.out:
        path = path.with_suffix(".gif")
    rollout = RolloutFrames(args.words[0], args.episodes, args.seed, args.which, args.trust, args.root)
    with clean_stdout(args):
        frames = write_video(rollout, path, args.fps)
    print_result(args, [f"{frames} frames, returns of the episodes: {_listed(rollout.returns)}", str(path)],
                 {"path": str(path), "pictures": frames, "episodes": len(rollout.returns), "returns": rollout.returns})
    return 0


def play(args: Namespace) -> int:
    """Show episodes in a window."""
    from qfleet.report import video

    rollout = RolloutFrames(args.words[0], args.episodes, args.seed, args.which, args.trust, args.root)
    with clean_stdout(args):
        video.show(rollout.frames(), f"qfleet: {args.words[0]}", args.fps)
    print_result(args, [f"returns {_listed(rollout.returns)}"],
                 {"episodes": len(rollout.returns), "returns": rollout.returns})
    return 0


def plot(args: Namespace) -> int:
    """Plot learning curves."""
    from qfleet.report import plots
    from qfleet.runs.directory import RunDirectory

    runs = [RunDirectory.open(word, args.root).path for word in args.words]
    path = plots.plot(runs, args.x, args.y, args.smooth, args.out)
    print_result(args, [str(path)], {"path": str(path), "runs": [str(run) for run in runs]})
    return 0


def export(args: Namespace) -> int:
    """Write a checkpoint that contains only the policy, or a file for another runtime."""
    from qfleet import api
    from qfleet.deploy.export import chosen_format
    from qfleet.deploy.verification import BATCH_SIZES

    run, out = args.words
    chosen = chosen_format(out, args.format)
    if chosen == "safetensors":
        path = api.export(run, out, args.which, root=args.root)
        print_result(args, [str(path)], {"path": str(path), "format": chosen})
        return 0
    with clean_stdout(args):
        agent = api.load(run, which=args.which, root=args.root, trust=args.trust)
        written = agent.export(out, chosen)
    ports = {"inputs": written.inputs, "outputs": written.outputs}
    lines = [f"{name:<8} {port.text}" for name, group in ports.items() for port in group]
    verified = "not verified: onnxruntime is not installed (pip install 'qfleet[onnx]')"
    if written.difference is not None:
        verified = (f"verified with batches of {', '.join(map(str, BATCH_SIZES))} random observations: largest "
                    f"difference from the policy {written.difference:.2g}")
    print_result(args, [*lines, verified, str(written.path)],
                 {"path": str(written.path), "format": chosen, "difference": written.difference,
                  **{name: [port.to_json() for port in group] for name, group in ports.items()}})
    return 0


class RolloutFrames:
    """Frames of consecutive greedy episodes, and the returns of the episodes that ended."""

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


def write_video(rollout: RolloutFrames, path: Path, fps: float) -> int:
    """Write an MP4 or, by the suffix, a GIF; shows a frame count on a terminal, since long episodes take time."""
    from qfleet.report import video

    video.without_display()
    write = video.write_gif if path.suffix.lower() == ".gif" else video.write_mp4
    with progress_counter("frames", period=100) as count:
        return write(rollout.frames(), path, fps, count)


def video_path(where: str | Path, which: str, seed: int, root: str | Path = "runs") -> Path:
    """Default path of a video: in the run, or next to a checkpoint that is outside of any run.

    Of a policy on the Hugging Face Hub: in the working directory.
    """
    from qfleet.runs import hub
    from qfleet.runs.checkpoint import is_checkpoint
    from qfleet.runs.directory import RunDirectory

    if hub.is_on_hub(where):
        return Path(f"{hub.repository(where)[0].rpartition('/')[2]}-seed{seed}.mp4")
    if not is_checkpoint(where):
        return RunDirectory.open(where, root).videos / f"{which}-seed{seed}.mp4"
    checkpoint = Path(where).expanduser().resolve()
    run = checkpoint.parent.parent
    folder = run / "videos" if (run / "run.json").is_file() else checkpoint.parent
    return folder / f"{checkpoint.name}-seed{seed}.mp4"


def describe_result(result: EvalResult) -> str:
    how = "greedy" if result.epsilon == 0 else f"ε = {result.epsilon:g}"
    episodes = f"{result.episodes} episode{'s' * (result.episodes != 1)}"
    error = "" if result.standard_error is None else f"standard error {result.standard_error:.2f}, "
    return (f"mean return {result.mean_reward:.2f} over {episodes} "
            f"({error}standard deviation {result.std_reward:.2f}, {how}, {result.protocol}, seed {result.seed})"
            + "".join(f", {name} {value:.3g}" for name, value in result.info.items()))


def _listed(returns: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in returns) or "none (no episode ended)"
