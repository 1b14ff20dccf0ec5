"""Options shared by NGU and Agent57: intrinsic rewards, policy family, curiosity networks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction, NonNegative, Positive, PositiveCount


class CuriosityConfig(Section):
    """Options of NGU and Agent57: policy family, intrinsic reward and off-policy targets."""

    memory: Literal["lstm", "none"] = Field(
        "lstm", description="lstm (recurrent, trained on sequences) or none (feed-forward, trained on transitions)")
    arms: PositiveCount = Field(
        32, description="number of policies (arms) of the network, from exploitation to exploration")
    beta: NonNegative = Field(0.3, description="β of the last arm: weight of the intrinsic reward; arm 0 has 0")
    share_arms: bool = Field(
        False, description="train every item under a random arm, not the one that acted, so that each arm learns from "
                           "all data")
    targets: Literal["retrace", "n_step"] = Field(
        "retrace", description="return estimate: retrace (off-policy correction) or n_step (uncorrected)")
    trace: Fraction = Field(0.95, description="λ of Retrace: larger values use longer returns")
    target_epsilon: Fraction = Field(0.01, description="ε of the ε-greedy target policy of Retrace")
    embedding: PositiveCount = Field(32, description="size of an embedding in the episodic memory")
    episodic_capacity: PositiveCount = Field(
        30_000, description="embeddings kept per episode; the oldest are overwritten")
    neighbours: PositiveCount = Field(10, description="k: nearest embeddings that the episodic bonus is computed from")
    kernel_epsilon: Positive = Field(
        1e-4, description="ε of the kernel: larger values let similarity fall more slowly with distance")
    cluster_distance: NonNegative = Field(0.008, description="ξ: normalised squared distances below this count as 0")
    max_similarity: Positive = Field(
        8.0, description="similarity to earlier observations of the episode above which the bonus is 0")
    modulator_max: Positive = Field(
        5.0, description="L: upper bound of the factor by which lifelong novelty (RND) multiplies the episodic bonus")
    novelty_horizon: PositiveCount = Field(
        1000, description="time constant of the running means of distance and RND error, actor steps")
    curious_hidden: tuple[PositiveCount, ...] = Field(
        (128,), description="widths of the dense layers in the embedding and RND networks")
    surprise_outputs: PositiveCount = Field(128, description="outputs of the RND networks")
    surprise_share: Fraction = Field(
        0.25, description="fraction of a batch that trains the RND predictor; lower values keep states novel for "
                          "longer")


def inactive_options(cfg: Any, more: dict[str, str]) -> dict[str, str]:
    """Keys without effect, in addition to those of the parent class (`more`), with the reason."""
    found = dict(more) | {"measure_drift": "this agent does not measure it"}
    if cfg.memory == "none":
        names = ("burn_in", "unroll", "stride", "state", "features", "units")
        found |= dict.fromkeys(names, "agent.memory=none trains on single transitions")
    return found | ({} if cfg.targets == "retrace" else dict.fromkeys(("trace", "target_epsilon"),
                                                                      "with agent.targets=n_step"))
