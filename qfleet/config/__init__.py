"""Strict YAML and typed config with dotted overrides; unknown, inactive and contradictory keys are errors."""

from qfleet.config.layers import DEFAULT, Layered, nest, without
from qfleet.config.plugins import (
    PluginName,
    defined_in_script,
    kinds_of,
    load_attribute,
    not_a_recipe,
    plugin,
    plugin_module,
    plugin_names,
    section_model,
)
from qfleet.config.schema import (
    Config,
    Count,
    Fraction,
    Integer,
    NonNegative,
    Positive,
    PositiveCount,
    Real,
    flatten,
    inactive_keys,
    sections,
)
from qfleet.config.strict_yaml import parse_mapping, parse_override, read_yaml, to_yaml
from qfleet.config.validation import build_config, validate

__all__ = [
    "DEFAULT",
    "Config",
    "Count",
    "Fraction",
    "Integer",
    "Layered",
    "NonNegative",
    "PluginName",
    "Positive",
    "PositiveCount",
    "Real",
    "build_config",
    "defined_in_script",
    "flatten",
    "inactive_keys",
    "kinds_of",
    "load_attribute",
    "nest",
    "not_a_recipe",
    "parse_mapping",
    "parse_override",
    "plugin",
    "plugin_module",
    "plugin_names",
    "read_yaml",
    "section_model",
    "sections",
    "to_yaml",
    "validate",
    "without",
]
