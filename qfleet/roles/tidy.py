"""A recording of an update made quicker, its results left as they are, bit by bit.

Shapes and parameters of a recording never change, nor does who reads what: what follows from them is done once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default)
VIEWS = (aten.t.default, aten.view.default, aten.expand.default)
SHAPED = (aten.arange.default, aten.arange.start_step, aten.scalar_tensor.default, aten.ones_like.default,
          aten.new_zeros.default)
"""Made from shapes alone, whatever the batch: one value for ever."""
PURE = (*VIEWS, aten.div.Scalar)
ALIKE = (*VIEWS, aten._to_copy.default, aten.cat.default, aten.gather.default, aten.select.int, aten.slice.Tensor,
         aten.squeeze.dim, aten.unsqueeze.default)
"""Which are the same whenever their arguments are."""
FRESH = (aten.addmm.default, aten.mm.default, aten.convolution.default)
"""Whose result is memory of its own."""

SHORT: dict[Any, Callable[..., Any]] = {
    aten.abs.default: torch.abs, aten.add.Tensor: torch.add, aten.addmm.default: torch.addmm,
    aten.argmax.default: torch.argmax,
    aten.bitwise_not.default: torch.bitwise_not, aten.cat.default: torch.cat, aten.clamp.default: torch.clamp,
    aten.expand.default: torch.Tensor.expand, aten.gather.default: torch.gather,
    aten.index_select.default: torch.index_select, aten.le.Tensor: torch.le, aten.lt.Tensor: torch.lt,
    aten.mean.default: torch.mean, aten.mean.dim: torch.mean, aten.mm.default: torch.mm, aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg, aten.rand.generator: torch.rand, aten.randint.generator: torch.randint,
    aten.scatter_add.default: torch.scatter_add, aten.relu.default: torch.relu, aten.relu_.default: torch.relu_,
    aten.select.int: torch.select, aten.squeeze.dim: torch.squeeze, aten.stack.default: torch.stack,
    aten.sub.Tensor: torch.sub, aten.sum.dim_IntList: torch.sum, aten.t.default: torch.t, aten.tanh.default: torch.tanh,
    aten.unsqueeze.default: torch.unsqueeze, aten.view.default: torch.Tensor.view, aten.where.self: torch.where,
}
"""The same kernels with half the way to them: these read their arguments by code made for each."""


def tidy(module: torch.fx.GraphModule) -> None:
    """Drop what costs time and changes nothing: detaches, transposes of transposes, and values that never change.

    Gradients are not computed in the rooms of the vector that they are copied to: kernels round otherwise where memory
    is aligned otherwise.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        if node.target in SAME:
            node.replace_all_uses_with(source)
        elif node.target is aten.t.default and getattr(source, "target", None) is aten.t.default:
            node.replace_all_uses_with(source.args[0])
    module.graph.eliminate_dead_code()
    if not any(_mutates(node) for node in module.graph.nodes):
        _fold(module)
        _straighten(module)
        _merge(module)
        _reuse(module)
    for node in module.graph.nodes:
        if node.op == "get_attr":  # found at once, and not after a search among parameters, buffers and submodules
            module.__dict__[node.target] = getattr(module, node.target)
        elif node.op == "call_function":
            node.target = SHORT.get(node.target, node.target)
    module.recompile()


def _straighten(module: torch.fx.GraphModule) -> None:
    """Leave out views that change no shape, and sums that keep an axis only to lose it in a view."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.view.default, aten.expand.default):
            continue
        source: Any = node.args[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if before == after:
            node.replace_all_uses_with(source)
        elif source.target is aten.sum.dim_IntList and source.args[1:] == ([0], True) and before[1:] == after \
                and len(source.users) == 1:
            source.args = (source.args[0], [0])
            node.replace_all_uses_with(source)
    module.graph.eliminate_dead_code()


def _merge(module: torch.fx.GraphModule) -> None:
    """Compute once what is asked for twice."""
    known: dict[Any, torch.fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" or (node.op == "call_function" and node.target in ALIKE):
            first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                module.graph.erase_node(node)


def _reuse(module: torch.fx.GraphModule) -> None:
    """Let a ReLU, and its derivative, write over what nobody else reads: memory that is in the cache already."""
    for node in module.graph.nodes:
        source: Any = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, torch.fx.Node) or source.target not in FRESH or len(source.users) > 1:
            continue
        if node.target is aten.relu.default:
            node.target = aten.relu_.default
        elif node.target is aten.threshold_backward.default:
            node.target, node.kwargs = aten.threshold_backward.grad_input, {"grad_input": source}


def _mutates(node: torch.fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _fold(module: torch.fx.GraphModule) -> None:
    """Compute what never changes now. Views of parameters count: they show whatever the optimizer writes."""
    known: dict[torch.fx.Node, torch.Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif node.op == "call_function" and _constant(node, known):
            args = torch.fx.node.map_arg(node.args, lambda arg: known[arg] if arg in known else _shape_of(arg))
            name = f"_constant_{len(known)}"
            known[node] = node.target(*args, **node.kwargs).detach()
            module.register_buffer(name, known[node], persistent=False)
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            known[constant] = known[node]
            node.replace_all_uses_with(constant)
    module.graph.eliminate_dead_code()


def _shape_of(node: torch.fx.Node) -> torch.Tensor:
    """A stand-in for a value of which only the shape matters."""
    seen = node.meta["val"]
    return torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)


def _constant(node: torch.fx.Node, known: dict[torch.fx.Node, torch.Tensor]) -> bool:
    if node.target in SHAPED:
        return True
    inputs = node.all_input_nodes
    return node.target in PURE and bool(inputs) and all(source in known for source in inputs)
