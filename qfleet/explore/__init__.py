"""Exploration strategies, one file each: `Config` and `build(cfg, lanes, first, total)`."""
