"""Configuration of a run: sections, rules, resolution, and the objects built from it."""
