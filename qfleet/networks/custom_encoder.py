"""Encoder of the user: an nn.Module that turns all observation leaves into features, named `module:attribute`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from qfleet.accel.kernels.images import image_input
from qfleet.config import PluginName, load_attribute
from qfleet.core.env import Leaf
from qfleet.core.errors import UserError

EncoderName = Annotated[str, PluginName(None, ("auto",)), Field(
    description="network from the observation to features: auto (torsos for images, one-hot categories, vectors "
                "unchanged), or your own nn.Module for all leaves, as module:attribute")]
"""Config field that names the user's encoder; `auto` is qfleet's own."""

EncoderOptions = Annotated[dict[str, Any], Field(
    description="keyword arguments of agent.encoder, in addition to the observation's leaves")]
"""Config field with the options of the user's encoder."""

ITEMS = 2
"""Observations of the trial pass: more than one, so that a module which mixes them up is found."""


class CustomEncoder(nn.Module):
    """{leaf: [B, ...]} -> [B, features], computed by a module of the user.

    The module is called with a dict of all leaves: images as floats in [0, 1], vectors as floats, both in the dtype of
    the network, and categories and images of symbols as int64. Its features may have any float dtype.
    """

    def __init__(self, observation: Mapping[str, Leaf], name: str, kwargs: Mapping[str, Any]) -> None:
        """Build the module and try it on blank observations.

        Args:
            observation: description of every leaf, the first argument of the user's class or function
            name: `module:attribute` of an nn.Module class, or of a function that returns a module
            kwargs: further keyword arguments

        Raises:
            UserError: the attribute cannot be called with these arguments, builds no module, or the module does not
                return one row of floats per observation.
        """
        super().__init__()
        self.leaves = dict(observation)
        self.module = _build(name, self.leaves, kwargs)
        with torch.no_grad():
            blank = {leaf_name: torch.zeros(ITEMS, *leaf.shape, dtype=getattr(torch, leaf.dtype))
                     for leaf_name, leaf in self.leaves.items()}
            self.features = _feature_count(f"agent.encoder={name}", self.module(self._inputs(blank, torch.float32)))

    def forward(self, obs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        features: torch.Tensor = self.module(self._inputs(obs, dtype))
        return features.to(dtype)

    def _inputs(self, obs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: _model_input(leaf, obs[name], dtype) for name, leaf in self.leaves.items()}


def _model_input(leaf: Leaf, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if leaf.kind == "category" or leaf.symbols:
        return x.long()
    if leaf.kind == "image":
        return image_input(x, dtype, leaf.divisor)
    return x.to(dtype)


def check_encoder(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError unless `name` can be imported and called with an observation and these keyword arguments."""
    _require_call(name, _load(name), kwargs)


def _load(name: str) -> Callable[..., Any]:
    target = load_attribute(name)
    if isinstance(target, nn.Module) or not callable(target):
        kind = type(target).__name__
        found = "a module that is already built" if isinstance(target, nn.Module) else f"of type {kind}"
        raise UserError(f"agent.encoder={name} is {found}; name an nn.Module class, or a function that returns one")
    return target


def _build(name: str, leaves: Mapping[str, Leaf], kwargs: Mapping[str, Any]) -> nn.Module:
    target = _load(name)
    _require_call(name, target, kwargs)
    module = target(dict(leaves), **kwargs)
    if not isinstance(module, nn.Module):
        raise UserError(f"agent.encoder={name} built a value of type {type(module).__name__}; an nn.Module is "
                        "needed")
    if not _accepts(module.forward, {}):
        raise UserError(f"agent.encoder={name}: forward{_signature(module.forward)} must take one argument, the "
                        "observation as a dict {leaf: tensor}")
    return module


def _require_call(name: str, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Compare the arguments with the signature, so that a TypeError inside the user's code is not mistaken for one."""
    if _accepts(target, kwargs):
        return
    known = [key for key, parameter in inspect.signature(target).parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    unknown = [key for key in kwargs if key not in known[1:]]
    close = [match for key in unknown for match in get_close_matches(key, known[1:], 1, 0.6)]
    wrong = f"; it has no {', '.join(unknown)}" if known and unknown else ""
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise UserError(f"agent.encoder={name} is called with the observation's leaves and agent.encoder_kwargs "
                    f"({', '.join(kwargs) or 'none are set'}), and takes {_signature(target)}{wrong}{hint}")


def _accepts(target: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the target can be called with one positional argument and these keywords, or has no known signature."""
    try:
        inspect.signature(target).bind(None, **kwargs)
    except TypeError:
        return False
    except ValueError:  # implemented in C
        return True
    return True


def _signature(target: Callable[..., Any]) -> str:
    """Parameters as text, without annotations."""
    signature = inspect.signature(target)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def require_torso(name: str, torso: Any, shape: tuple[int, ...]) -> None:
    """UserError unless the torso `name` of the user is a module from images [B, *shape] to features [B, F]."""
    if not isinstance(torso, nn.Module):
        raise UserError(f"agent.torso={name} built a value of type {type(torso).__name__}; an nn.Module is needed")
    with torch.no_grad():
        _feature_count(f"agent.torso={name}", torso(torch.zeros(ITEMS, *shape)))


def _feature_count(setting: str, features: Any) -> int:
    """F of the features [B, F] that the module of a setting returned; raises UserError for any other output."""
    if not isinstance(features, torch.Tensor):
        raise UserError(f"{setting} returned a value of type {type(features).__name__}; it must return "
                        "one tensor [B, F], with B observations and F features")
    shape = tuple(features.shape)
    if len(shape) != 2 or shape[0] != ITEMS or not shape[1]:
        hint = "; end with x.flatten(1)" if len(shape) > 2 and shape[0] == ITEMS else ""
        raise UserError(f"{setting} returned a tensor of shape {list(shape)} for {ITEMS} observations; it "
                        f"must return [{ITEMS}, F], one row of F features per observation{hint}")
    if not features.is_floating_point():
        raise UserError(f"{setting} returned {str(features.dtype).removeprefix('torch.')}; features must be "
                        "floats")
    return shape[1]
