"""Shards of a parameter vector in this process."""

from qfleet.optim.optimizer import shapes_within, slices_within, split_evenly
from qfleet.sync.ps_shard import Shard


def make_shards(master, optimizer, cfg, param_slices=(), shapes=()):
    return [Shard(f"shard {index}", master[piece], optimizer, cfg, slices_within(param_slices, piece),
                  shapes_within(shapes, piece))
            for index, piece in enumerate(split_evenly(len(master), cfg.shards))]
