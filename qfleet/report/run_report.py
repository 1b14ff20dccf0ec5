"""Report of runs as one self-contained HTML file: curves, scores, videos, speed, configuration.

`gather` reads run directories into plain data, `report` writes the page. Names and settings are embedded as data,
never as markup.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from qfleet import __version__
from qfleet.core.errors import UserError
from qfleet.core.final_score import standard_error
from qfleet.report import scores
from qfleet.report.bottleneck import find_bottleneck, unused_speedups
from qfleet.report.plots import IGNORED_KEYS, RunCurve, RunGroup, group_runs, read_run
from qfleet.report.return_gap import eval_episodes, find_gap
from qfleet.report.series import columns, evaluations
from qfleet.report.webpage import CHARTS, list_videos, read_video, render_page
from qfleet.runs.atomic_file import atomic_file
from qfleet.runs.directory import RunDirectory
from qfleet.runs.metric_writers import is_number
from qfleet.runs.run_state import describe_state, run_state

SCRIPTS = (*CHARTS, "tables.js", "report.js")

DEFAULT_VIDEOS = 6
"""Videos of a page in total, unless the number per run is given."""

MAX_VIDEO_BYTES = 64 * 2**20
"""A page of this size still opens quickly and can be sent by email."""


def report(directories: Sequence[str | Path], out: str | Path | None = None, videos: int | None = None) -> Path:
    """Write the page and return its path; the default is in the first run's directory. `videos` is a number per run."""
    paths = [Path(directory) for directory in directories]
    target = paths[0] / "report.html" if out is None else Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"cannot write {target}: the name of a report must end in .html")
    data, encoded = gather(paths, videos)
    text = render_page(data["title"], SCRIPTS, data, encoded)
    with atomic_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
    return target


def gather(directories: Sequence[Path], videos: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the data of the page, and the videos as base64."""
    folders = sorted({path.resolve(): path for path in directories}.values(),
                     key=lambda path: natural_key(path.resolve().name))
    runs = [read_run(folder) for folder in folders]
    groups = sorted(group_runs(runs), key=lambda members: natural_key(members.label))
    place = {id(run): index for index, members in enumerate(groups) for run in members.runs}
    chosen, encoded = choose_videos(folders, max(1, DEFAULT_VIDEOS // len(folders)) if videos is None else videos)
    described = [describe_run(run, folder) | {"group": place[id(run)], "films": found}
                 for run, folder, found in zip(runs, folders, chosen, strict=True)]
    environments = sorted({run.env_id for run in runs} - {""})
    data = {"title": f"{', '.join(environments[:3]) or 'Runs'}{' …' if len(environments) > 3 else ''}",
            "made": datetime.now().astimezone().isoformat(timespec="minutes"), "version": __version__,
            "runs": described, "groups": [{"label": members.label} for members in groups],
            "scores": score_rows(groups), "config": config_rows(groups)}
    return data, encoded


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which `run2` comes before `run10`. Case matters only between names that are equal otherwise."""
    parts = [(0, int(part), "") if part.isdecimal() else (1, 0, part)
             for part in re.findall(r"[0-9]+|[^0-9]+", name.lower())]
    return [*parts, (2, 0, name)]


def describe_run(run: RunCurve, folder: Path) -> dict[str, Any]:
    """Curves, state, scores, bottleneck and attempts of one run."""
    directory = RunDirectory(folder)
    evaluated = evaluations(run.records)
    last: Mapping[str, Any] = run.records[-1]
    flat = run.config.get
    bottleneck = find_bottleneck(run.records, unused_speedups(flat("device"), flat("learner.precision"),
                                                              flat("learner.capture") == "true", directory.has_gpu()))
    final = evaluated[-1][1] if evaluated else None
    gap = find_gap(run.records, _sections(flat))
    return {"name": run.name, "env": run.env_id, "seed": run.config.get("seed", ""), "series": columns(run.records),
            "state": describe_state(directory, run_state(directory)),
            "steps": last.get("step"), "updates": last.get("updates"),
            "frames": last.get("frames"), "episodes": last.get("episodes"), "time_s": last.get("time_s"),
            "final": final, "best": max((score for _, score in evaluated), default=None),
            "evaluations": len(evaluated), "episodes_each": eval_episodes(_sections(flat)),
            "score": None if run.score is None else asdict(run.score), "gap": None if gap is None else gap.to_json(),
            "human": None if final is None else scores.human_normalised(run.env_id, final),
            "verdict": None if bottleneck is None else [bottleneck.limit, bottleneck.evidence, bottleneck.advice],
            "ratio": _number(flat("replay.samples_per_insert")), "alpha": _number(flat("replay.alpha")),
            "attempts": attempts_of(directory)}


def attempts_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """Every start and resume as labelled texts: time, command, hardware and versions."""
    found = []
    for attempt in directory.attempts():
        hardware, git, versions = (_mapping(attempt.get(name)) for name in ("hardware", "git", "versions"))
        command = attempt.get("command")
        words = [str(word) for word in command] if isinstance(command, list) else []
        memory = hardware.get("memory_bytes")
        rows = {"started": attempt.get("started"), "command": shlex.join(["qfleet", *words[1:]]) if words else None,
                "resumed from": attempt.get("resumed_from"), "folder": attempt.get("directory"),
                "cpu": hardware.get("cpu"), "cores": hardware.get("cores"),
                "memory": f"{memory / 1e9:.1f} GB" if isinstance(memory, int) else None,
                "gpu": ", ".join(map(str, hardware.get("gpus") or [])) or "none", "platform": attempt.get("platform"),
                "python": attempt.get("python"), "git commit": git.get("commit"),
                "git state": "changed since the commit" if git.get("dirty") else None}
        found.append({key: str(value) for key, value in (rows | versions).items() if value is not None})
    return found


def choose_videos(folders: Iterable[Path], most: int) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Select videos of each run, newest first, and return them also as base64; videos beyond the limit are left out."""
    chosen: list[list[dict[str, Any]]] = []
    encoded: list[str] = []
    room = MAX_VIDEO_BYTES
    for folder in folders:
        shown: list[dict[str, Any]] = []
        for file in list_videos(folder / "videos")[:most]:
            if file.lstat().st_size <= room:
                data = read_video(file)
                room -= len(data)
                shown.append({"name": file.name, "reel": len(encoded), "bytes": len(data)})
                encoded.append(base64.b64encode(data).decode())
        chosen.append(shown)
    return chosen, encoded


def score_rows(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """One row per configuration, and one over all games for configurations that differ only in the game."""
    rows, by_agent = [], dict[str, list[tuple[str, list[float]]]]()
    for index, members in enumerate(groups):
        finals = [evaluated[-1][1] for run in members.runs if (evaluated := evaluations(run.records))]
        if not finals:
            continue
        env = members.runs[0].env_id
        human = [value for score in finals if (value := scores.human_normalised(env, score)) is not None]
        rows.append({"group": index, "label": members.label, "env": env, **_summary([finals], "score"),
                     **(_summary([human], "human") if human else {}), "seeds": len(finals), "fewest": len(finals),
                     "finals": finals, "errors": [last_error(run) for run in members.runs if evaluations(run.records)],
                     "fresh": [asdict(run.score) for run in members.runs if run.score is not None]})
        if human:
            rest = {key: value for key, value in members.runs[0].settings.items() if key != "env.id"}
            by_agent.setdefault(json.dumps(rest, sort_keys=True), []).append((env, human))
    for games in by_agent.values():
        if len(games) > 1:
            rows.append({"group": None, "label": f"all {len(games)} games", "env": ", ".join(env for env, _ in games),
                         **_summary([human for _, human in games], "human"), "finals": [], "errors": [], "fresh": [],
                         "seeds": sum(len(human) for _, human in games),
                         "fewest": min(len(human) for _, human in games)})
    return rows


def last_error(run: RunCurve) -> float | None:
    """Standard error of a run's last evaluation; None if unknown."""
    episodes, last = eval_episodes(_sections(run.config.get)), evaluations(run.records)[-1][0]
    spreads = [record.get("eval/std_reward") for record in run.records if record.get("step") == last]
    std = next((each for each in reversed(spreads) if is_number(each)), None)
    return None if episodes is None or std is None else standard_error(std, episodes)


def _sections(flat: Callable[[str], str | None]) -> dict[str, Any]:
    """The eval section of a config given by dotted keys, with numbers."""
    found = {name: _number(flat(f"eval.{name}")) for name in ("episodes", "max_episode_steps")}
    return {"eval": {name: int(value) for name, value in found.items() if value is not None}}


def _summary(strata: Sequence[Sequence[float]], name: str) -> dict[str, Any]:
    """IQM with its interval; the interval is None if there is only one seed."""
    middle, low, high = scores.iqm_interval(strata, np.random.default_rng(zlib.crc32(repr(strata).encode())))
    several = any(len(scored) > 1 for scored in strata)
    return {name: middle, f"{name}_low": low if several else None, f"{name}_high": high if several else None}


def config_rows(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """All keys with the values of each group, and True for `differs` if they distinguish the groups."""
    keys = dict.fromkeys(key for members in groups for run in members.runs for key in run.config)
    rows = []
    for key in keys:
        values = [", ".join(dict.fromkeys(run.config.get(key, "not set") for run in members.runs))
                  for members in groups]
        rows.append({"key": key, "values": values, "incidental": key.startswith(IGNORED_KEYS),
                     "differs": len(set(values)) > 1 and not key.startswith(IGNORED_KEYS)})
    return rows


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
