"""Exploration strategies, one file each: `Config` and `build(cfg, lanes, first, total)`.

A `Config` may say what the rules of a run need: `epsilon_key`, its key that sets the amount of random actions;
`continuous`, true for noise on continuous actions; and `discrete`, true if it chooses discrete actions itself.
"""
