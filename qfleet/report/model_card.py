"""The card of a trained policy, as the Hugging Face hub shows it: what it plays, how well, and how to use it.

The front matter follows the hub's convention for reinforcement learning; a film named replay.mp4 beside it is shown on
the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from qfleet import __version__
from qfleet.report.scores import human_normalised

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
VIDEO_FILE = "replay.mp4"


def model_card(repo: str, settings: Mapping[str, Any], score: Mapping[str, Any], trained: Mapping[str, int],
               filmed: bool) -> str:
    """The text of README.md. `score` is an evaluation as JSON, `trained` has steps and updates."""
    env, algo = (" ".join(str(_inner(settings, *place)).split()) for place in (("env", "id"), ("agent", "algo")))
    reward = f"{score['mean_reward']:.2f} +/- {score['std_reward']:.2f}"
    metric = {"type": "mean_reward", "name": "mean_reward", "value": reward, "verified": False}
    front = {"library_name": "qfleet", "tags": [env, algo, "deep-reinforcement-learning", "reinforcement-learning",
                                                "qfleet"],
             "model-index": [{"name": algo, "results": [{
                 "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
                 "dataset": {"name": env, "type": env}, "metrics": [metric]}]}]}
    human = human_normalised(env, score["mean_reward"])
    rows = {"environment": env, "algorithm": algo, "mean return": reward,
            "episodes": f"{score['episodes']}, {score['protocol']}, seed {score['seed']}",
            **({} if human is None else {"human-normalised": f"{human:.0%}"}),
            "trained for": f"{trained['steps']:,} steps, {trained['updates']:,} updates",
            "seed of the run": settings.get("seed"), "made with": f"qfleet {__version__}"}
    name = repo.rpartition("/")[2]
    return "\n".join([
        "---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# {_code(algo)} on {_code(env)}", "", *([f"The film is [{VIDEO_FILE}]({VIDEO_FILE}).", ""] if filmed else []),
        "| | |", "|---|---|", *(f"| {key} | {_code(value)} |" for key, value in rows.items()), "",
        "```console", f"$ hf download {repo} --local-dir {name}", f"$ qfleet eval {name}", f"$ qfleet record {name}",
        "```", "", "```python", "import qfleet", "", f'agent = qfleet.load("{name}")', "action = agent.act(obs)", "```",
        "", "`config.yaml` holds the whole configuration: `qfleet train config.yaml` trains it again. Weights are "
        "safetensors, and nothing here is unpickled.", ""])


def _inner(settings: Mapping[str, Any], section: str, key: str) -> Any:
    inner = settings.get(section)
    return inner.get(key, "") if isinstance(inner, Mapping) else ""


def _code(value: Any) -> str:
    """Text that stays text, whatever is in it."""
    plain = re.sub(r"[`|\r\n]", " ", str(value))
    return f"`{plain}`"
