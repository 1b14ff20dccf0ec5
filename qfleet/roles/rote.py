"""Acting by rote: what an agent did to choose is recorded once and played back, as `learner.capture` does with updates.

A small network chooses for a lane or a few in less time than its modules take to call each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qfleet.agent import Arm, Decision, Memory, Tensors
from qfleet.roles.trace import traced

log = logging.getLogger(__name__)

Act = Callable[[nn.Module, Tensors, Memory, Arm, torch.Generator], Decision]


class Rote:
    """Stands for an agent's `act`, with one network and one generator. For agents without a memory, whose arms are an ε
    and nothing else; others, and those that cannot be recorded, act as they are."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self._plays: dict[tuple[bool, torch.Size], Act] = {}

    def __call__(self, net: nn.Module, obs: Tensors, memory: Memory, arm: Arm, rng: torch.Generator) -> Decision:
        if memory is not None or arm.index is not None or arm.sigma is not None:
            return self.act(net, obs, memory, arm, rng)
        key = arm.noise, arm.epsilon.shape
        play = self._plays.get(key)
        if play is None:
            play = self._plays[key] = self._learn(net, obs, arm, rng)
        return play(net, obs, memory, arm, rng)

    def _learn(self, net: nn.Module, obs: Tensors, arm: Arm, rng: torch.Generator) -> Act:
        """A recording of this choice, if it repeats it; the generators are as they were."""
        shown = {name: leaf.clone() for name, leaf in obs.items()}
        now, greedy = Arm(arm.epsilon.clone(), arm.noise), Arm(torch.zeros_like(arm.epsilon), arm.noise)
        state = rng.get_state()

        def outcome(act: Act) -> list[Any]:
            rng.set_state(state)
            found = [act(net, shown, None, its, rng) for its in (now, greedy)]
            return [x for one in found for x in (one.action, *one.extras.values())] + [rng.get_state()]

        try:
            # Tensors that were made for inference only cannot be recorded.
            with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
                play = self._record(net, shown, now, rng)
                pairs = zip(outcome(self.act), outcome(play), strict=True)
                if all(torch.equal(one, other) for one, other in pairs):
                    return play
            reason = "the recording does not repeat it, as with randomness that is not the given generator's"
        except Exception as error:  # whatever the tracer meets, acting itself is sound
            reason = f"{type(error).__name__}: {error}"
        finally:
            rng.set_state(state)
        log.warning("learner.capture: this agent's acting cannot be recorded (%s); it runs as it is", reason)
        return self.act

    def _record(self, net: nn.Module, obs: Tensors, arm: Arm, rng: torch.Generator) -> Act:
        names, extras = list(obs), list[str]()

        def choose(epsilon: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
            found = self.act(net, dict(zip(names, leaves, strict=True)), None, Arm(epsilon, arm.noise), rng)
            extras[:] = found.extras
            return [found.action, *found.extras.values()]

        forward = traced(choose, arm.epsilon, *obs.values())

        def play(net: nn.Module, obs: Tensors, memory: Memory, arm: Arm, rng: torch.Generator) -> Decision:
            action, *rest = forward(arm.epsilon, *[obs[name] for name in names])
            return Decision(action, None, dict(zip(extras, rest, strict=True)))

        return play
