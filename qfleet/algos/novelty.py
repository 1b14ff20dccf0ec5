"""Intrinsic reward of NGU and Agent57 at acting time: episodic novelty times lifelong novelty.

Shapes: N lanes, M stored embeddings, D embedding dimensions, k neighbours, P parameters of the embedding network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qfleet.algos.curiosity import CuriosityConfig
from qfleet.core.agent import Memory, Tensors
from qfleet.core.devices import is_on_host
from qfleet.maths.nearest_neighbours import knn_squared_distances, knn_topk_padded
from qfleet.maths.novelty import NoveltyKernel, episodic_bonus, modulator, running_mean
from qfleet.maths.sequences import masked_mean
from qfleet.networks.curiosity import call_with_parameters, flatten_parameters


def refresh_embedding_weights(embed: nn.Module, memory: Memory, capacity: int) -> Memory:
    """Update the embedding weights held for each lane, keeping them constant within an episode.

    Embeddings from different weights cannot be compared: any drift makes familiar observations look novel. Two versions
    are held (`episodic.old` and `episodic.new` [P]), and every lane uses one of them (`episodic.newer` [N]) until its
    episode ends:

        an episode starts   its lane uses `new`, which takes the newest weights unless another lane uses it
        `old` is unused     `new` becomes `old`, and the lanes that use it switch to that name

    So newer weights wait for the longest running episode. A full memory whose weights are out of date is cleared: an
    endless episode delays the others for at most `capacity` steps.
    """
    count, newer, old, new = (memory[f"episodic.{name}"] for name in ("count", "newer", "old", "new"))
    newest, started = flatten_parameters(embed), count == 0
    used = (~newer & ~started).any()
    old, newer = torch.where(used, old, new), newer & used
    started = started | ((count >= capacity) & ~newer & (old != newest).any())
    new = torch.where((newer & ~started).any(), new, newest)
    return memory | {"episodic.old": old, "episodic.new": new, "episodic.newer": newer | started,
                     "episodic.count": torch.where(started, 0, count)}


def embed_observations(embed: nn.Module, obs: Tensors, memory: Memory) -> torch.Tensor:
    """Embeddings [N, D], each lane with its own version of the weights."""
    newer, found = memory["episodic.newer"], None
    for name, lanes in (("episodic.old", ~newer), ("episodic.new", newer)):
        if avoid_sync(lanes):
            keys = call_with_parameters(embed, memory[name], obs).float()
            found = keys if found is None else torch.where(lanes.unsqueeze(1), keys, found)
        elif lanes.any():
            keys = call_with_parameters(embed, memory[name], {name: leaf[lanes] for name, leaf in obs.items()}).float()
            found = keys.new_empty(len(lanes), keys.shape[1]) if found is None else found
            found[lanes] = keys
    assert found is not None
    return found


def avoid_sync(tensor: torch.Tensor) -> bool:
    """True if both branches should be computed: reading a GPU value synchronises, which a CUDA graph cannot do."""
    return not is_on_host(tensor)


def intrinsic_reward(curiosity: Any, obs: Tensors, memory: Memory, cfg: CuriosityConfig) -> tuple[torch.Tensor, Memory]:
    """Intrinsic reward [N] of reaching these observations, and the memory with their embeddings added."""
    filled = memory["episodic.count"]
    if avoid_sync(filled) or ((filled == 0) | (filled >= cfg.episodic_capacity)).any():
        memory = refresh_embedding_weights(curiosity.embed, memory, cfg.episodic_capacity)
    keys, count = memory["episodic.keys"], memory["episodic.count"]
    key = embed_observations(curiosity.embed, obs, memory)
    bonus, after = novelty(curiosity, obs, memory, knn_squared_distances(keys, count, key, cfg.neighbours), cfg)
    # In place: copying all embeddings at every step would cost more than the search. The oldest are overwritten.
    keys[torch.arange(len(key), device=key.device), count % keys.shape[1]] = key
    return bonus, memory | after


def frozen_intrinsic_reward(
    curiosity: Any, obs: Tensors, memory: Memory, cfg: CuriosityConfig
) -> tuple[torch.Tensor, Tensors]:
    """`intrinsic_reward` of weights that never change, in operations that can be exported; and the changed state."""
    keys, count = memory["episodic.keys"], memory["episodic.count"]
    key = curiosity.embed(obs).float()
    bonus, after = novelty(curiosity, obs, memory, knn_topk_padded(keys, count, key, cfg.neighbours), cfg)
    slot = torch.arange(keys.shape[1], device=key.device) == (count % keys.shape[1]).unsqueeze(1)
    return bonus, after | {"episodic.keys": torch.where(slot.unsqueeze(2), key.unsqueeze(1), keys)}


def novelty(
    curiosity: Any, obs: Tensors, memory: Memory, near: torch.Tensor, cfg: CuriosityConfig
) -> tuple[torch.Tensor, Tensors]:
    """Intrinsic reward [N] of observations with neighbours at the squared distances `near` [N, k].

    Also returns the next running statistics and the number of observations in the episode.
    """
    known = torch.isfinite(near)
    mean, seen, any_known = memory["distance.mean"], memory["distance.count"], known.any()
    distance = masked_mean(near.nan_to_num(posinf=0.0), known)
    mean, seen = torch.where(any_known, running_mean(mean, seen, distance, cfg.novelty_horizon), mean), seen + any_known
    error, surprises = curiosity.rnd_error(obs), memory["surprise.count"]
    mean_error = running_mean(memory["surprise.mean"], surprises, error.mean(), cfg.novelty_horizon)
    var = running_mean(memory["surprise.var"], surprises, (error - mean_error).square().mean(), cfg.novelty_horizon)
    kernel = NoveltyKernel(
        cfg.neighbours, cfg.kernel_epsilon, cluster=cfg.cluster_distance, similarity=cfg.max_similarity
    )
    bonus = episodic_bonus(near, mean.expand(near.shape[0]), kernel)
    bonus = bonus * modulator(error, mean_error, var.sqrt(), cfg.modulator_max)
    return bonus, {"episodic.count": memory["episodic.count"] + 1, "distance.mean": mean, "distance.count": seen,
                   "surprise.mean": mean_error, "surprise.var": var, "surprise.count": surprises + 1}
