"""Trained agent with frozen weights, for use outside of a training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qfleet import __version__, envs
from qfleet.actor.policy import Policy
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Obs
from qfleet.core.errors import UserError
from qfleet.deploy.export import ExportedPolicy, GraphFormat, chosen_graph_format, require_absent, write_policy
from qfleet.deploy.policy_graph import PolicyGraph
from qfleet.envs.leaf_reader import OutOfSpace, SpaceMismatch
from qfleet.envs.spaces import SpaceAdapter
from qfleet.interface.scoring import require_probability
from qfleet.launch import attempt
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint


class TrainedAgent:
    """Trained agent with frozen weights, as `load` and `Run.agent` return it.

    Attributes:
        spec: Observations and actions of the environment.
        config: Config of the run.
        checkpoint: Checkpoint of the weights; None for weights of a run that is being trained.

    Examples:
        >>> agent = qfleet.load("runs/my-run")
        >>> obs, _ = env.reset(seed=1)
        >>> over = False
        >>> while not over:
        ...     obs, reward, terminated, truncated, _ = env.step(agent.act(obs))
        ...     over = terminated or truncated
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, policy: Policy, checkpoint: Checkpoint | None = None) -> None:
        """Created by `load` and `Run.agent`.

        Args:
            config: Config of the run.
            spec: Observations and actions of the environment.
            policy: The agent with its weights.
            checkpoint: Origin of the weights.
        """
        self.config, self.spec, self.policy, self.checkpoint = config, spec, policy, checkpoint

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: RunConfig, device: torch.device) -> TrainedAgent:
        """Load the weights of a checkpoint.

        Args:
            checkpoint: The checkpoint.
            config: Config of its run.
            device: Device of the network.

        Returns:
            The agent.

        Raises:
            UserError: The weights do not fit the network that the config describes.
        """
        policy = Policy(make_agent(config, checkpoint.spec), 0, device)
        try:
            policy.load(checkpoint.policy(), checkpoint.manifest.updates)
        except ValueError as error:
            raise UserError(f"checkpoint {checkpoint.path}: the weights do not fit the network that its config "
                            f"describes ({error}); it was not written by this version of qfleet") from error
        return cls(config, checkpoint.spec, policy, checkpoint)

    def __repr__(self) -> str:
        weights = f"{self.policy.version:,} updates" if self.checkpoint is None else self.checkpoint.path.name
        return f"TrainedAgent({self.spec.id}, {self.config.agent.algo}, {weights}, {self.policy.device})"

    @property
    def network(self) -> nn.Module:
        """The network, in evaluation mode."""
        return self.policy.flat.net

    def require_env(self, spec: EnvSpec) -> None:
        """Check that an environment has the observations and actions that the agent was trained on.

        Args:
            spec: Observations and actions of the environment.

        Raises:
            UserError: They differ.
        """
        where = "the agent was" if self.checkpoint is None else f"checkpoint {self.checkpoint.path} was"
        attempt.require_same_spaces(f"{where} trained on", self.spec, "the environment", spec)

    def reset(self) -> None:
        """Reset the recurrent state at the start of an episode."""
        self.policy.end_episodes()

    def act(self, obs: Any, epsilon: float = 0.0, *, reward: Any = 0.0, over: Any = False) -> Any:
        """Choose an action for one observation or for a batch.

        Args:
            obs: An observation of the environment (or a batch, if observations are plain arrays), or the network's
                inputs by name (see `spec`), with or without a batch axis. Stacked images are inputs of the network.
            epsilon: Probability of a random action.
            reward: Reward of the last action, for recurrent agents; one value or one per lane of the batch.
            over: True where the observation starts a new episode, for recurrent agents; one value or one per lane.

        Returns:
            An action for `env.step`, or an array of actions for a batch.

        Raises:
            UserError: The observation does not fit the agent, or contains NaN or infinity.

        Examples:
            >>> obs, reward, terminated, truncated, info = env.step(agent.act(obs))
        """
        require_probability(epsilon)
        leaves, single = self._finite_leaves(obs)
        lanes = len(next(iter(leaves.values())))
        if self.policy.memory is not None:
            self.policy.observe(np.full(lanes, reward, np.float32), np.full(lanes, over, bool))
        chosen = self.policy.act(leaves, ExplorationParams(torch.full((lanes,), epsilon), network_noise=False))[0]
        numbers = chosen.tolist() if self.spec.box is None else list(chosen)
        actions = numbers if self.interpreter is None else [self.interpreter.actions.decode(n) for n in numbers]
        return actions[0] if single else np.asarray(actions)

    def export(self, out: str | Path, format: GraphFormat | None = None) -> ExportedPolicy:
        """Write the greedy policy as an ONNX or TorchScript file, and compare the file with the policy.

        Args:
            out: Path of the file; it must not exist.
            format: `onnx` or `torchscript`; None = by the suffix of `out` (.onnx, .pt, .ts), else `onnx`.

        Returns:
            The path, the names, shapes and types of inputs and outputs, and the largest difference.

        Raises:
            UserError: The agent cannot be exported, or a package is not installed.
            ExportError: The file cannot be written, or its outputs differ from those of the policy.

        Examples:
            >>> exported = qfleet.load("runs/my-run").export("policy.onnx")
            >>> [each.name for each in exported.outputs]
            ['action', 'q']
        """
        require_absent(out)
        chosen = chosen_graph_format(out, format)
        policy = Policy(self.policy.agent, 0, torch.device("cpu"))
        policy.load(self.policy.flat.state(), self.policy.version)
        graph = PolicyGraph(policy.agent, policy.flat.net, self.spec, self.interpreter, policy.persistent())
        return write_policy(graph, out, chosen, self._description())

    def q_values(self, obs: Any) -> np.ndarray:
        """Values of all actions for one observation or for a batch. A greedy `act` chooses the largest.

        The values estimate the discounted return. For distributional agents they are means. For recurrent agents they
        depend on the observations that `act` has received. `q_values` itself does not change the recurrent state.

        Args:
            obs: An observation or a batch, as for `act`.

        Returns:
            An array [A], or [N, A] for a batch. The actions are in the order of `env.action_space`.

        Raises:
            UserError: The observation does not fit the agent, or its actions have no values: they are continuous.

        Examples:
            >>> bool(agent.q_values(obs).argmax() == agent.act(obs))
            True
        """
        leaves, single = self._finite_leaves(obs)
        values = self.policy.q_values(leaves)
        if values is None:
            why = "its actions are continuous" if self.spec.box is not None else "its algorithm has no Agent.q_values"
            raise UserError(f"agent.algo={self.config.agent.algo} has no values of actions: {why}")
        return values[0] if single else values

    @cached_property
    def interpreter(self) -> SpaceAdapter | None:
        """Conversion from the environment's spaces, or None.

        Checkpoints of earlier versions do not contain the spaces: for these, an environment is built.
        """
        try:
            found = envs.make_space_adapter(self.config.env, self.spec.spaces)
        except ValueError as error:
            raise UserError(f"the spaces stored in checkpoint {self.checkpoint and self.checkpoint.path} cannot be "
                            f"read ({error}): it was not written by this version of qfleet") from error
        if found is not None:
            self.require_env(EnvSpec(self.spec.id, found.encoder.leaves, found.actions.n, box=found.actions.box))
        return found

    def _description(self) -> dict[str, Any]:
        """Origin of the policy as JSON, for an exported file; paths and hosts are left out."""
        manifest = None if self.checkpoint is None else self.checkpoint.manifest
        origin = {} if manifest is None else {"run": manifest.run, "steps": manifest.step, "score": manifest.notes}
        config = self.config.model_dump(mode="json", include={"agent", "env", "explore", "learner", "replay", "seed"})
        return {"qfleet": __version__, "algo": self.config.agent.algo, "env": self.spec.to_json(), "config": config,
                "updates": self.policy.version, **origin}

    def _finite_leaves(self, obs: Any) -> tuple[Obs, bool]:
        leaves, single = self._leaves(obs)
        for name, leaf in leaves.items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise UserError(f"observation {name!r} contains NaN or infinity: there is no action for it")
        return leaves, single

    def _leaves(self, obs: Any) -> tuple[Obs, bool]:
        """Return the network's inputs [N, ...], and True if `obs` was a single observation."""
        try:
            if self.interpreter is not None:
                return self.interpreter.encode(obs)
        except OutOfSpace as error:
            raise UserError(str(error)) from None
        except SpaceMismatch as error:
            return self._as_leaves(obs, f" ({error})")
        return self._as_leaves(obs, "")

    def _as_leaves(self, obs: Any, hint: str) -> tuple[Obs, bool]:
        given = obs if isinstance(obs, Mapping) else {next(iter(self.spec.observation)): obs}
        if set(given) != set(self.spec.observation):
            raise UserError(f"the agent observes {sorted(self.spec.observation)}, not {sorted(map(str, given))}{hint}")
        try:
            arrays = {name: np.asarray(given[name], leaf.dtype) for name, leaf in self.spec.observation.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"the observation cannot be read: {error}{hint}") from None
        name, leaf = next(iter(self.spec.observation.items()))
        single = arrays[name].ndim == len(leaf.shape)
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        lanes = arrays[name].shape[:1]
        for name, leaf in self.spec.observation.items():
            if arrays[name].shape != (*lanes, *leaf.shape):
                raise UserError(f"observation {name!r} has shape {arrays[name].shape[single:]}; it must be "
                                f"{leaf.shape}, or a batch of these{hint}")
        return arrays, single
