"""Plugins: sections whose model and values whose code is found by name, in a package or as `module:attribute`.

A file name is a plugin name: `algo: dqn` means `qfleet/algos/dqn.py`, which defines `Config` and `build`. Code outside
the package is named `my_module:my_object`, where the object (a module, class or namespace) has these two attributes.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from qfleet.config.objects import find_object, is_object
from qfleet.config.schema import Config
from qfleet.core.errors import UserError

USER_PLUGIN_SCHEMA = {"type": "string", "pattern": "^[^:]+:.+$", "description": "your own, as module:attribute"}
"""JSON schema of a `module:attribute` name."""


def load_attribute(reference: str, *default: Any) -> Any:
    """Import the object named `module:attribute`; the working directory is searched, too.

    A default, as for `getattr`, is returned if the imported module lacks the attribute. `object:NAME` is an object of
    this program (see `qfleet.config.objects`).
    """
    if is_object(reference):
        return find_object(reference)
    module_name, attribute = _split_reference(reference)
    found = _import(module_name, reference)
    path = module_name
    for name in attribute.split("."):
        if not hasattr(found, name):
            if default:
                return default[0]
            if module_name == "__main__":
                raise UserError(defined_in_script(attribute))
            raise UserError(f"{reference!r}: {path} has no attribute {name!r}{_did_you_mean(name, dir(found))}")
        found, path = getattr(found, name), f"{path}.{name}"
    return found


def defined_in_script(name: str) -> str:
    """Message for a name of `__main__` that another program wrote."""
    return (f"{name} was defined in the script or notebook that started the run, and this program has no such "
            "definition: pass it again, as env=... or wrappers=[...] of qfleet.resume, evaluate, load or rollout, or "
            "put it into a file of its own")


def _split_reference(reference: str) -> tuple[str, str]:
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise UserError(f"{reference!r}: write module:attribute, such as my_module:MyClass")
    return module_name, attribute


def _import(name: str, reference: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            files = [path.stem for path in Path(here).glob("*.py")]
            raise UserError(f"{reference!r}: there is no module {error.name!r} in {here} nor among the installed "
                            f"packages{_did_you_mean(name, files)}") from None
        raise UserError(f"{reference!r}: module {name} needs {error.name!r}, which is not installed") from None
    except Exception as error:
        kind = type(error).__name__
        raise UserError(f"{reference!r}: importing {name} failed with {kind}: {error}; "
                        f"see `python -c 'import {name}'`") from error


def not_a_recipe(path: Path) -> str:
    """Message for a Python file given as a recipe, with the environments in it. The file is parsed, not run."""
    try:
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        module = ".".join(path.resolve().relative_to(Path.cwd()).with_suffix("").parts)
    except (OSError, ValueError, SyntaxError):
        return f"{path} is a Python file: use module:Class instead, from the folder of the file"
    envs = [node for node in classes if any(ast.unparse(base).endswith("Env") for base in node.bases)]
    found = [f"{module}:{node.name}" for node in envs or classes]
    meant = f"did you mean {' or '.join(found[:3])}?" if found else f"use an environment in it, as {module}:Class"
    return f"{path} is a Python file: {meant}"


def _did_you_mean(name: str, names: list[str]) -> str:
    close = get_close_matches(name, [other for other in names if not other.startswith("_")], 3, 0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def plugin_names(package: str) -> list[str]:
    """Names of the plugins of a package, in alphabetical order."""
    return [name for name in _files(package)
            if _missing_attribute(importlib.import_module(f"{package}.{name}")) is None]


def _files(package: str) -> list[str]:
    """Public modules of a package, in alphabetical order."""
    paths = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_"))


def plugin_module(package: str, name: str) -> Any:
    """Object with `Config` and `build` for a plugin name. Hyphens and underscores are equivalent."""
    if ":" in name:
        module = load_attribute(name)
        if missing := _missing_attribute(module):
            raise UserError(f"{name!r}: has no {missing}; give it `Config` (a qfleet.config.Config) and `build`")
        return module
    canonical = name.replace("-", "_")
    if canonical in _files(package):  # avoids importing the other plugins
        module = importlib.import_module(f"{package}.{canonical}")
        if _missing_attribute(module) is None:
            return module
    known, home, plain = plugin_names(package), importlib.import_module(package), canonical.casefold()
    if absent := getattr(home, "NOT_IMPLEMENTED", {}).get(plain):
        raise UserError(absent)
    alias = getattr(home, "ALIASES", {}).get(plain)
    hint = f"; use {alias}" if alias else _did_you_mean(canonical, known)
    raise UserError(f"{name!r} is not one of {', '.join(known)}, or module:attribute{hint}")


@dataclass(frozen=True)
class PluginName:
    """Annotation of a string that is one of `words`, names a module of `package`, or is a user's `module:attribute`.

    Example: `Torso = Annotated[str, PluginName("qfleet.networks.torsos", ("auto",))]`. A user's attribute is imported
    by the code that builds it, not here.
    """

    package: str | None
    words: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return [*self.words, *(_files(self.package) if self.package else [])]

    def check(self, name: str) -> str:
        """Return the name; raises UserError if it is unknown."""
        if ":" in name:
            return ":".join(_split_reference(name))
        if name not in self.names():
            raise UserError(f"{name!r} is not one of {', '.join(self.names())}, or module:attribute"
                            f"{_did_you_mean(name, self.names())}")
        return name

    def _validate(self, name: str) -> str:
        try:
            return self.check(name)
        except UserError as error:
            raise PydanticCustomError("plugin", "{text}", {"text": str(error)}) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema,
                                     handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "anyOf": [{"enum": self.names()}, USER_PLUGIN_SCHEMA]}


def _missing_attribute(module: Any) -> str | None:
    """Attribute that an object lacks to be a plugin, or None."""
    model = getattr(module, "Config", None)
    if not (isinstance(model, type) and issubclass(model, Config)):
        return "`Config` that is a section (a subclass of qfleet.config.Config)"
    return None if callable(getattr(module, "build", None)) else "function `build`"


@dataclass(frozen=True)
class Plugin:
    """Annotation of a section whose `key` names its plugin; `default` is used if the section names none."""

    package: str
    key: str
    default: str

    def make(self) -> Config:
        """The section of the default plugin with default values."""
        return self.check({})

    def model(self, value: Any) -> type[Config] | None:
        """Model of the section, or None if its plugin is unknown."""
        try:
            model: type[Config] = plugin_module(self.package, (value or {}).get(self.key, self.default)).Config
        except (UserError, TypeError, AttributeError):
            return None
        return model

    def check(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("model_type", "not a section")
        name = value.get(self.key, self.default)
        if not isinstance(name, str):
            kinds = ", ".join(plugin_names(self.package))
            raise self._error(f"must name one of {kinds}, or module:attribute (got {name!r})", name)
        try:
            model: type[Config] = plugin_module(self.package, name).Config
        except UserError as error:
            raise self._error(str(error), name) from None
        if self.key not in model.model_fields:
            raise self._error(f"`Config` of {name!r} needs a field `{self.key}: str`, which holds this name", name)
        return model.model_validate({**value, self.key: name if ":" in name else name.replace("-", "_")})

    def _error(self, text: str, value: Any) -> ValidationError:
        problem = PydanticCustomError("plugin", "{text}", {"text": text})
        details = InitErrorDetails(type=problem, loc=(self.key,), input=value)
        return ValidationError.from_exception_data("plugin", [details])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(self.check, serialization=dump)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema,
                                     handler: GetJsonSchemaHandler) -> dict[str, Any]:
        models = {name: plugin_module(self.package, name).Config for name in plugin_names(self.package)}
        kinds = [{**handler(model.__pydantic_core_schema__), "title": name} for name, model in models.items()]
        own = {
            "type": "object", "title": "module:attribute", "properties": {self.key: USER_PLUGIN_SCHEMA},
            "required": [self.key]}
        return {"anyOf": [*kinds, own]}


def plugin(package: str, key: str, default: str) -> Plugin:
    """Annotation of a section whose model is found by name in `package`; `key` is the field with the name.

    `ALGO = plugin("qfleet.algos", "algo", "dqn")`, `agent: Annotated[Any, ALGO] = Field(default_factory=ALGO.make)`.
    """
    return Plugin(package, key, default)


def _dump(section: Config, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return section.model_dump(mode=info.mode)


def section_model(field: FieldInfo, value: Any) -> type[Config] | None:
    """Model of a field that is a section; None for a plain field or an unknown plugin."""
    for annotation in field.metadata:
        if isinstance(annotation, Plugin):
            return annotation.model(value)
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Config) else None


def kinds_of(model: type[Config]) -> dict[str, tuple[str, str]]:
    """Section -> (key with the plugin name, default plugin), for the plugin sections of a model."""
    return {name: (annotation.key, annotation.default) for name, field in model.model_fields.items()
            for annotation in field.metadata if isinstance(annotation, Plugin)}
