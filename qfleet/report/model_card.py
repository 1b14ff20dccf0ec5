"""Model card of a trained policy for the Hugging Face Hub: environment, score and usage.

The front matter follows the Hub's convention for reinforcement learning; the page also shows a video named replay.mp4
in the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from qfleet import __version__
from qfleet.report.scores import human_normalised

VIDEO_FILE = "replay.mp4"


def model_card(repo: str, settings: Mapping[str, Any], score: Mapping[str, Any], trained: Mapping[str, int],
               has_video: bool) -> str:
    """Return the text of README.md. `score` is an evaluation as JSON, `trained` has steps and updates."""
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
            **({} if (error := score.get("standard_error")) is None else {"standard error": f"{error:.2f}"}),
            **({} if human is None else {"human-normalised": f"{human:.0%}"}),
            "trained for": f"{trained['steps']:,} steps, {trained['updates']:,} updates",
            "seed of the run": settings.get("seed"), "created with": f"qfleet {__version__}"}
    return "\n".join([
        "---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# {_code(algo)} on {_code(env)}", "", *([f"Video: [{VIDEO_FILE}]({VIDEO_FILE}).", ""] if has_video else []),
        "| | |", "|---|---|", *(f"| {key} | {_code(value)} |" for key, value in rows.items()), "",
        "```console", "$ pip install 'qfleet[hub]'", f"$ qfleet eval hf:{repo}", f"$ qfleet record hf:{repo}",
        "```", "", "```python", "import qfleet", "", f'agent = qfleet.load("hf:{repo}")', "action = agent.act(obs)",
        "```", "", "`config.yaml` contains the full configuration: `qfleet train config.yaml` repeats the training. "
        "Weights are stored as safetensors, and nothing is unpickled.", ""])


def _inner(settings: Mapping[str, Any], section: str, key: str) -> Any:
    inner = settings.get(section)
    return inner.get(key, "") if isinstance(inner, Mapping) else ""


def _code(value: Any) -> str:
    """Format a value as inline code that cannot contain markup."""
    plain = re.sub(r"[`|\r\n]", " ", str(value))
    return f"`{plain}`"
