"""The learner: gradients, optimizer, flat parameters, weights for actors."""
