"""Checks of the installation and diagnosis of runs, for `qfleet doctor`.

`examine` collects versions, extras, cores, memory, disk, GPU and display; `diagnose` reads the metrics and logs of a
run. `render` and `explain` turn the results into text.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qfleet import __version__
from qfleet.config import read_yaml
from qfleet.core.display import display_name
from qfleet.core.final_score import FinalScore
from qfleet.report.bottleneck import acting_shares, percent
from qfleet.report.return_gap import GAP_LABEL
from qfleet.report.status import RunGoal, RunStatus, format_duration, format_number, format_score, format_size
from qfleet.runs.directory import RunDirectory
from qfleet.runs.machine import cpu_model, gpus, memory_bytes, package_version
from qfleet.runs.metric_writers import read_metrics
from qfleet.runs.run_state import describe_state, run_state
from qfleet.runs.safe_open import no_follow_opener, open_no_follow

CORE = ("torch", "numpy", "gymnasium", "pydantic", "numba", "zstandard", "safetensors", "tensorboard", "rich")
EXTRAS = {"atari": ("ale-py", "opencv-python-headless"), "mujoco": ("mujoco",),
          "box2d": ("box2d", "pygame-ce"), "minigrid": ("minigrid",), "minatar": ("minatar",), "ray": ("ray",),
          "video": ("imageio-ffmpeg", "pillow", "pygame-ce"), "plot": ("matplotlib",), "wandb": ("wandb",),
          "mlflow": ("mlflow-skinny",), "hub": ("huggingface-hub",), "onnx": ("onnx", "onnxscript", "onnxruntime"),
          "tune": ("optuna", "matplotlib")}
SERVES = {"atari": "Atari games", "mujoco": "MuJoCo environments",
          "box2d": "Box2D environments", "minigrid": "MiniGrid and BabyAI environments",
          "minatar": "MinAtar games", "ray": "launcher=ray",
          "video": "videos and the window of `play`", "plot": "learning curves as images",
          "wandb": "Weights & Biases", "mlflow": "MLflow", "hub": "policies on the Hugging Face Hub",
          "onnx": "policies as ONNX files", "tune": "`qfleet tune`"}
FAULTS = {
    "fault/env_rebuilds": "episodes were lost because environments failed: test them with `qfleet check-env`",
    "fault/bad_updates": "updates were skipped because the loss or gradient was not finite: lower "
                         "learner.learning_rate or set learner.clip_norm; the batches are in faults/",
    "fault/checkpoints_failed": "checkpoints could not be written: free disk space",
    "fault/bad_messages": "malformed messages were rejected: check that all hosts have the same software",
    "wire/retries": "calls were repeated because no answer came: check the network, or the learner was restarted",
    "replay/clamped_priorities": "priorities were not finite or out of range and were clamped: check train/priority",
}
RATIO_TOLERANCE, RATIO_UPDATES = 0.05, 100
"""Relative difference between measured and configured samples per insert that is tolerated after that many updates."""

START = re.compile(rb"=== .+: start (\d+) ===$")


def examine(plan: Mapping[str, str] | None = None, root: str | Path = ".") -> dict[str, Any]:
    """Return all findings as plain data. `plan` is the plan of a recipe, `root` the directory of its runs."""
    return {
        "qfleet": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in CORE},
        "extras": {extra: {"installed": all(package_version(name) for name in names),
                           "packages": {name: package_version(name) for name in names},
                           "serves": SERVES[extra], "install": f"pip install 'qfleet[{extra}]'"}
                   for extra, names in EXTRAS.items()},
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(Path(root)),
        "gpu": gpus(),
        "tools": {"compiler": shutil.which("g++") or shutil.which("clang++") or shutil.which("cl"),
                  "ffmpeg": _ffmpeg(), "display": display_name()},
        "plan": dict(plan) if plan is not None else None,
    }


def render(report: Mapping[str, Any]) -> str:
    """Format the findings: what is installed, what is missing, and how to install it."""
    cpu, memory, disk, tools = report["cpu"], report["memory"], report["disk"], report["tools"]
    packages = "  ".join(f"{name} {version or 'MISSING'}" for name, version in report["packages"].items())
    rows = [
        ("qfleet", f"{report['qfleet']}, Python {report['python']}, {report['platform']}"),
        ("packages", packages),
        ("cpu", f"{cpu['model']}, {cpu['cores']} usable cores of {cpu['present']}"),
        (
            "threads",
            f"torch {cpu['threads']['vectors']} for vectors, {cpu['threads']['images']} for images; "
            f"environments {cpu['threads']['env']}"
            + (f"; torch 1 for a GPU, decoding {cpu['threads']['decode']}" if report["gpu"] else ""),
        ),
        (
            "bf16",
            f"{cpu['bf16_speed']:.2g} times as fast as fp32 on the CPU: learner.precision=auto selects "
            f"{'bf16' if cpu['bf16'] else 'fp32'} for images",
        ),
        (
            "memory",
            f"{format_size(memory['available'])} free of {format_size(memory['total'])}" if memory else "unknown"),
        ("disk", f"{format_size(disk['free'])} free of {format_size(disk['total'])} at {disk['path']}"),
        ("gpu", _gpu_text(report["gpu"])),
        ("compiler", tools["compiler"] or "none: learner.compile needs one (apt install g++)"),
        ("ffmpeg", tools["ffmpeg"] or "none: pip install 'qfleet[video]'"),
        ("display", tools["display"] or "none: use `qfleet record` instead of `qfleet play`"),
    ]
    lines = [f"{name:<10} {text}" for name, text in rows]
    lines.append("extras")
    for extra, facts in report["extras"].items():
        state = "installed" if facts["installed"] else f"missing    {facts['install']}"
        lines.append(f"  {extra:<8} {facts['serves']:<34} {state}")
    if report["plan"] is not None:
        lines += ["plan", *(f"  {name:<11} {text}" for name, text in report["plan"].items())]
    return "\n".join(lines)


def diagnose(run: RunDirectory) -> dict[str, Any]:
    """Diagnose a run from its metrics and logs, as plain data. The config is not validated, so nothing is imported."""
    status = RunStatus(
        RunGoal.from_settings(read_yaml(run.config, no_follow_opener) if run.config.is_file() else {}, run.has_gpu())
    )
    for record in read_metrics(run.metrics):
        status.add(record)
    latest, mean, bottleneck = status.latest, status.recent_means(), status.bottleneck()
    steps_s, updates_s = status.rates()
    lag = mean.get("fleet/policy_lag", mean.get("actor/policy_lag"))
    state, gap, score = run_state(run), status.return_gap(), run.final_score()
    return {
        "run": str(run.path), "state": state, "words": describe_state(run, state),
        "steps": latest.get("step", 0), "updates": latest.get("updates", 0), "seconds": latest.get("time_s", 0.0),
        "limit": None if bottleneck is None else asdict(bottleneck),
        "rates": {"steps_per_s": steps_s, "updates_per_s": updates_s},
        "actor_time": acting_shares(mean), "loop_time": status.loop_shares(),
        "samples_per_insert": {"measured": latest.get("replay/samples_per_insert"), "configured": status.goal.ratio},
        "policy_lag": lag, "replay_bytes": latest.get("replay/bytes"), "actors": latest.get("fleet/actors"),
        "restarts": _restarts(run.path / "logs"),
        "faults": {tag: latest[tag] for tag in FAULTS if latest.get(tag)},
        "score": None if score is None else asdict(score), "return_gap": None if gap is None else gap.to_json(),
    }


def explain(report: Mapping[str, Any]) -> list[str]:
    """Format a diagnosis, with bottleneck and remedy first."""
    limit, rates, ratio = report["limit"], report["rates"], report["samples_per_insert"]
    rows = [
        ("run", f"{report['run']} {report['words']}"),
        ("done", f"{report['steps']:,} steps, {report['updates']:,} updates in {format_duration(report['seconds'])}")]
    if limit is None:
        rows.append(("limited by", "unknown: no record contains timings yet"))
    else:
        rows += [("limited by", f"{limit['limit']}: {limit['evidence']}"), ("advice", limit["advice"])]
    if (score := FinalScore.from_json(report["score"])) is not None:
        rows.append(("score", format_score(score)))
    if (gap := report["return_gap"]) is not None:
        rows.append(("warning", f"{GAP_LABEL}: {gap['evidence']}: {gap['reason']}; {gap['remedy']}"))
    if rates["steps_per_s"] is not None:
        rows.append(("rates", f"{format_number(round(rates['steps_per_s']))} steps/s, "
                              f"{format_number(round(rates['updates_per_s']))} updates/s"))
    if report["actors"] is not None:
        rows.append(("actors", f"{report['actors']:.0f} alive at the last record"))
    for name, key in (("actor time", "actor_time"), ("loop time", "loop_time")):
        if report[key]:
            rows.append((name, ", ".join(f"{part} {percent(share)}" for part, share in report[key].items())))
    if ratio["measured"] is not None:
        rows.append(("ratio", _ratio_text(ratio["measured"], ratio["configured"], report["updates"])))
    if report["policy_lag"] is not None:
        rows.append(("policy lag", f"{format_number(round(report['policy_lag'], 1))} updates"))
    if report["replay_bytes"] is not None:
        rows.append(("memory", f"{format_size(report['replay_bytes'])} of replay"))
    rows += [("restarts", f"{count} of {name}, see {report['run']}/logs/{name}.log")
             for name, count in report["restarts"].items()]
    rows += [("fault", f"{count:.0f} {FAULTS[tag]}") for tag, count in report["faults"].items()]
    if not (report["restarts"] or report["faults"]):
        rows.append(("faults", "none"))
    return [f"{name:<10} {text}" for name, text in rows]


def _ratio_text(measured: float, configured: float | None, updates: int) -> str:
    if configured is None:
        return f"{format_number(measured)} samples per insert"
    text = f"{format_number(measured)} samples per insert, {format_number(configured)} configured"
    if updates < RATIO_UPDATES or abs(measured / configured - 1) <= RATIO_TOLERANCE:
        return text
    return f"{text}: the learner is {'behind' if measured < configured else 'ahead'}"


def _restarts(logs: Path) -> dict[str, int]:
    """Number of restarts of each process according to its log; processes without a restart are left out."""
    found = {}
    for path in sorted(logs.glob("*.log")):
        try:
            with open_no_follow(path) as lines:
                count = sum(1 for line in lines if (start := START.match(line)) and int(start[1]) > 1)
        except OSError:
            continue
        if count:
            found[path.stem] = count
    return found


def _cpu() -> dict[str, Any]:
    from qfleet.accel.precision import bf16_gain, bf16_is_faster
    from qfleet.accel.threads import decoding_threads, thread_plan, usable_cores

    images, vectors = thread_plan(images=True), thread_plan(images=False)
    return {"model": cpu_model(), "present": os.cpu_count(),
            "cores": usable_cores(), "bf16": bf16_is_faster(), "bf16_speed": round(bf16_gain(), 2),
            "threads": {"images": images.torch, "vectors": vectors.torch, "env": images.env,
                        "decode": decoding_threads(1, on_gpu=True, alone=False)}}


def _memory() -> dict[str, int] | None:
    """Total and available bytes, both within the container's limit if there is one."""
    from qfleet.replay.memory_plan import available_memory

    limit, available, total = _read("/sys/fs/cgroup/memory.max").strip(), available_memory(), memory_bytes()
    if available is None or total is None:
        return None
    return {"total": min(total, int(limit)) if limit.isdigit() else total, "available": available}


def _disk(root: Path) -> dict[str, Any]:
    place = root.expanduser().absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"path": str(place), "total": usage.total, "free": usage.free}


def _gpu_text(found: list[dict[str, Any]]) -> str:
    if not found:
        return "none: device=auto means cpu"
    return "; ".join(
        f"{gpu['name']}, {format_size(gpu['memory'])}, bf16 {'yes' if gpu['bf16'] else 'no'}" for gpu in found
    )


def _ffmpeg() -> str | None:
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return shutil.which("ffmpeg")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
