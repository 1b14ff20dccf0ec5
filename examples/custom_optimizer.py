"""An optimizer and a learning-rate schedule of your own: Lion (Chen et al. 2023), with a rate that falls in steps.

    qfleet train cartpole learner.optimizer=custom_optimizer:Lion learner.schedule=custom_optimizer:steps
"""

import torch


class Lion(torch.optim.Optimizer):
    """Moves every weight by the learning rate, in the direction of the sign of a mean gradient."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            near, far = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:  # frozen in this update
                    continue
                state = self.state[weight]
                mean = state.setdefault("mean", torch.zeros_like(weight))
                weight.sub_(mean.lerp(weight.grad, 1 - near).sign_(), alpha=group["lr"])
                mean.lerp_(weight.grad, 1 - far)


def steps(progress):
    """Factor of the learning rate, of the progress from 0 to 1."""
    return 1.0 if progress < 0.5 else 0.3 if progress < 0.75 else 0.1
