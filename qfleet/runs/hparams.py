"""Settings of a run as hyper-parameters of TensorBoard, so that its HParams tab compares the runs of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LEFT_OUT = ("run.", "callbacks", "init_from")
"""Keys that say where a run is and what it writes. Others are logged, also those that have their default: TensorBoard
takes the columns of the table from one run, and another run may have changed another key."""

DEFAULT = "default"
"""Source of a key that neither a recipe nor the user has set."""

METRICS = {"eval/final_score": "score of the best policy", "eval/best_reward": "best evaluation",
           "eval/mean_reward": "last evaluation", "rollout/ep_rew_mean": "training return"}
"""Tag -> title of the metrics in the table: the last values of these scalars."""


def hparam_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by dotted key: numbers, texts and booleans; other values as JSON."""
    return {key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flat_settings(config) if not key.startswith(LEFT_OUT)}


def origin_rank(source: str) -> int:
    """Order keys by the origin of their value: 0 = set by the user, 1 = by a recipe, 2 = the default."""
    return 2 if source == DEFAULT else int(source.startswith("recipe "))


def hparam_summaries(config: Mapping[str, Any], sources: Mapping[str, str]) -> list[Any]:
    """Return the summaries that declare the columns of the table and the settings of this run.

    `sources` says where the value of a key comes from. TensorBoard shows the first columns: keys that the user has set
    come first, and then those of a recipe.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # type: ignore[import-untyped]

    values = hparam_values(config)
    infos = [api_pb2.HParamInfo(name=key, type=_type(values[key]), differs=sources.get(key, DEFAULT) != DEFAULT)
             for key in sorted(values, key=lambda key: (origin_rank(sources.get(key, DEFAULT)), key))]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=title)
               for tag, title in METRICS.items()]
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in values.items():
        field = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) \
            else "number_value"
        setattr(start.hparams[key], field, value)
    experiment = api_pb2.Experiment(name="qfleet", hparam_infos=infos, metric_infos=metrics)
    contents = {metadata.EXPERIMENT_TAG: plugin_data_pb2.HParamsPluginData(experiment=experiment),
                metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=start)}
    return [Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
            for tag, content in contents.items()]


def _type(value: Any) -> int:
    from tensorboard.plugins.hparams import api_pb2

    kind = "BOOL" if isinstance(value, bool) else "STRING" if isinstance(value, str) else "FLOAT64"
    return int(getattr(api_pb2, f"DATA_TYPE_{kind}"))


def flat_settings(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Return the settings of a config by dotted key."""
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        rows += flat_settings(value, f"{path}{key}.") if isinstance(value, dict) else [(path + key, value)]
    return rows
