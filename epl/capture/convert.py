"""An exported program as a graph of EPL's IR: the one place that reads torch's node metadata and operator schemas.

Private torch API, with the reason for each (none has a public alternative in torch 2.13):

- ``OpOverload._schema``: which arguments an operator writes to, and which its result may alias;
- ``ExportedProgram.constants``: values of lifted tensors are public, their placeholders' order is in ``graph_signature``.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.export.graph_signature import InputKind

from epl.capture.export import Exported
from epl.capture.functions import FUNCTION_LIBRARY, FunctionCall
from epl.capture.marks import AUTOCAST, DEFAULT, GRAD, SCOPE, SEGMENT
from epl.capture.random_operators import argument_at, num_draws
from epl.capture.refusals import user_line_of_stack
from epl.capture.tags import Tagger
from epl.errors import CaptureError
from epl.ir.graph import Argument, Buffer, Constant, Graph, Input, Op, Output, Parameter, Ref, map_refs
from epl.ir.types import ListType, ScalarType, TensorType, Type

__all__ = ["Converted", "convert"]

# the class of every ATen operator, which has no public name
OpOverload = type(torch.ops.aten.add.Tensor)

# operators whose schema does not say that they change a running statistic: positions of the arguments, and the
# position of the flag that turns it on
_HIDDEN_WRITES = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}
# operators that return their argument itself in some modes, unknown to the schema
_HIDDEN_VIEWS = ("aten.dropout.", "aten.alpha_dropout.", "aten.feature_dropout.", "aten.lift_fresh.")
_PYTHON_OPERATORS = (operator, torch)
# what torch.func leaves in a graph
_FUNCTION_TRANSFORMS = (
    *("lazy_load_decompositions", "_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting"),
    *("_enter_dual_level", "enter_dual_level", "_func_increment_nesting"),
)
# nested graphs that only say in which mode their operators run
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_SKIPPED = ("aten._assert_tensor_metadata.", "aten.sym_constrain_range", "aten._assert_async.")


@dataclass(frozen=True)
class Converted:
    """A graph, and what it names but cannot hold: callables and constant tensors."""

    graph: Graph
    functions: dict[str, Callable[..., Any]]
    constants: dict[str, torch.Tensor]


@dataclass
class _Building:
    """The graph under construction."""

    tagger: Tagger
    ops: list[Op] = field(default_factory=list)
    names: dict[fx.Node, Argument] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    calls: list[FunctionCall] = field(default_factory=list)
    num_draws: int = 0

    def unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.taken:
            candidate, count = f"{name}_{count}", count + 1
        self.taken.add(candidate)
        return candidate

    @cached_property
    def trained_memory(self) -> frozenset[int]:
        """Where the data of all parameters are that require a gradient: of an unregistered one, export keeps the data."""
        parameters = [item for item in gc.get_objects() if type(item) is nn.Parameter and item.requires_grad]
        return frozenset(
            [parameter.data_ptr() for parameter in parameters if not parameter.is_meta and parameter.numel()]
        )

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is the data of a parameter that requires a gradient."""
        return tensor.data_ptr() in self.trained_memory if tensor.numel() and not tensor.is_meta else False


def convert(exported: Exported, model: nn.Module, paths: tuple[str, ...]) -> Converted:
    """The graph of an exported step.

    Args:
        exported: What export gave.
        model: The model, for the names of its tensors and the tags of its modules.
        paths: Path of each tensor in the batch.
    """
    program = exported.program
    tagger = Tagger(model, exported.marks.strategies, exported.marks.entered)
    building = _Building(tagger, calls=exported.marks.functions.calls)
    leaves = _leaves(program, model, paths, building)
    constants = leaves.pop("constant_values")
    _convert_ops(program.graph, building)
    outputs = _outputs(exported, building)
    graph = Graph(**leaves, ops=tuple(building.ops), outputs=outputs, strategies=tuple(tagger.specs()))
    return Converted(graph, building.functions, constants)


def _leaves(program: Any, model: nn.Module, paths: tuple[str, ...], building: _Building) -> dict[str, Any]:
    """The graph's leaves; a tensor that the model holds under several names is one leaf."""
    owned = _owned_tensors(model)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    found: dict[str, Any] = {"inputs": [], "parameters": [], "buffers": [], "constants": [], "constant_values": {}}
    by_tensor: dict[int, str] = {}
    user_paths = iter(paths)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, kind = specs[node.name], _type_of(node.meta["val"])
        if spec.kind is InputKind.USER_INPUT:
            name = building.unique(_identifier(f"in_{node.name}"))
            found["inputs"].append(Input(name, _tensor(kind, node), next(user_paths)))
        else:
            tensor = _held_tensor(program, model, spec)
            if id(tensor) in by_tensor:
                building.names[node] = Ref(by_tensor[id(tensor)])
                continue
            name = building.unique(_identifier(node.name))
            by_tensor[id(tensor)] = name
            leaf = Constant(name, _tensor(kind, node))
            _add_held(found, leaf, tensor, owned, is_foreign=_is_from_outside(node) and building.is_trained(tensor))
            if isinstance(tensor, nn.Parameter):
                building.tagger.note_parameter(name, tensor)
        building.names[node] = Ref(name)
    return {key: value if key == "constant_values" else tuple(value) for key, value in found.items()}


def _add_held(
    found: dict[str, Any], leaf: Constant, tensor: torch.Tensor, owned: dict[int, Any], *, is_foreign: bool
) -> None:
    """Add a tensor that the model holds, as the kind of leaf that it is."""
    paths, persistent = owned.get(id(tensor), ((), False))
    if isinstance(tensor, nn.Parameter) and paths:
        found["parameters"].append(Parameter(leaf.name, leaf.type, paths[0], tensor.requires_grad, paths[1:]))
    elif paths:
        found["buffers"].append(Buffer(leaf.name, leaf.type, paths[0], persistent))
    elif tensor.requires_grad or is_foreign:
        raise CaptureError(
            f"forward uses a tensor of type {leaf.type} that requires a gradient and is no parameter of the model (it may "
            "be in a module in a plain list, or in loss_fn): nothing would reduce its gradient. Register it in the model "
            "(nn.Parameter, nn.ModuleList), or call requires_grad_(False) on it."
        )
    else:
        found["constants"].append(leaf)
        found["constant_values"][leaf.name] = tensor


def _is_from_outside(node: fx.Node) -> bool:
    """True for a tensor that forward found somewhere; one that it makes of Python numbers is lifted at its use."""
    return not all(str(user.target).startswith("aten.lift_fresh") for user in node.users)


def _owned_tensors(model: nn.Module) -> dict[int, tuple[tuple[str, ...], bool]]:
    """id of each parameter and buffer -> (its paths, first one first; whether it is in the state dict)."""
    persistent = set(model.state_dict(keep_vars=True))
    found: dict[int, tuple[tuple[str, ...], bool]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, tensor in named:
        paths, kept = found.get(id(tensor), ((), False))
        found[id(tensor)] = ((*paths, path), kept or path in persistent)
    return found


def _held_tensor(program: Any, model: nn.Module, spec: Any) -> torch.Tensor:
    path = str(spec.target).removeprefix("model.")
    holder, _, attribute = path.rpartition(".")
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        tensor = getattr(model.get_submodule(holder), attribute)
        if isinstance(tensor, torch.Tensor):
            return tensor
    if spec.kind is InputKind.CONSTANT_TENSOR:
        return program.constants[spec.target]
    kind = type(program.constants.get(spec.target)).__name__ if spec.kind is InputKind.CUSTOM_OBJ else spec.kind.name
    raise CaptureError(
        f"forward uses an object that a graph cannot hold yet: a {kind} ({spec.target}). Random numbers are to be drawn "
        "without a torch.Generator."
    )


def _tensor(kind: Type, node: fx.Node) -> TensorType:
    if not isinstance(kind, TensorType):
        raise CaptureError(f"{node.name} is {kind}; a tensor is needed")
    return kind


def _identifier(name: str) -> str:
    return "".join(char if char.isalnum() or char == "_" else "_" for char in name)


def _type_of(value: Any) -> Type:
    if isinstance(value, torch.Tensor):
        return TensorType(value.dtype, tuple(size if isinstance(size, int) else None for size in value.shape))
    if isinstance(value, (list, tuple)):
        return ListType(tuple(_type_of(item) for item in value))
    for kind, classes in (
        ("bool", (bool, torch.SymBool)),
        ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)),
    ):
        if isinstance(value, classes):
            return ScalarType(kind)
    return ScalarType("none")


# -- operators ------------------------------------------------------------------------------------------------------


def _convert_ops(graph: fx.Graph, building: _Building) -> Any:
    for node in graph.nodes:
        if node.op == "call_function":
            _convert_node(node, building)
        elif node.op == "output":
            return node.args[0]
    return None


def _convert_node(node: fx.Node, building: _Building) -> None:
    if str(getattr(node.target, "__name__", node.target)) in _REGIONS:
        _inline(node, building)
        return
    text = _target_text(node)
    if text.startswith(_SKIPPED):
        return
    if text == "python.getitem" and isinstance(building.names.get(_first(node)), tuple):
        building.names[node] = building.names[_first(node)][node.args[1]]  # type: ignore[index]
        return
    args = tuple(_argument(arg, building) for arg in node.args)
    kwargs = tuple((key, _argument(value, building)) for key, value in node.kwargs.items())
    op = Op(building.unique(_identifier(node.name)), _type_of(node.meta.get("val")), text, args, kwargs)
    op = _with_place(op, node, building)
    op = _with_effects(op, node, building)
    building.ops.append(op)
    building.names[node] = Ref(op.name)


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _inline(node: fx.Node, building: _Building) -> None:
    """Put the operators of a nested graph in place of the call; the marks on them say what holds there."""
    place = next(place for place, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    body, *args = node.args[place:]
    module = getattr(node.graph.owning_module, str(body.target))  # type: ignore[union-attr]
    placeholders = [inner_node for inner_node in module.graph.nodes if inner_node.op == "placeholder"]
    for placeholder, arg in zip(placeholders, args, strict=True):
        building.names[placeholder] = _argument(arg, building)
    results = _convert_ops(module.graph, building)
    building.names[node] = _argument(results, building)


def _target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        text = str(target)
        if text.startswith(FUNCTION_LIBRARY):
            return f"function.{text.split('.')[1]}"
        return text
    name = getattr(target, "__name__", str(target))
    if any(getattr(module, name, None) is target for module in _PYTHON_OPERATORS) or name.startswith("sym_"):
        return f"python.{name}"
    hint = " (torch.func: vmap, grad, jvp)" if name in _FUNCTION_TRANSFORMS else ""
    raise CaptureError(
        f"the graph has a {name} operator{hint}, which EPL cannot run yet\n  at {_source(node) or '(no line of the model)'}"
    )


def _argument(arg: Any, building: _Building) -> Argument:
    if isinstance(arg, fx.Node):
        return building.names[arg]
    if isinstance(arg, (list, tuple)):
        return tuple(_argument(item, building) for item in arg)
    if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CaptureError(f"the graph depends on a size that is known only at run time: {arg}")
    return arg


def _with_place(op: Op, node: fx.Node, building: _Building) -> Op:
    custom = node.meta.get("custom") or {}
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    # the outermost entry is the wrapper around model and loss; what runs in it alone is no module's
    modules = [path.split("@")[0].removeprefix("model").removeprefix(".") for path in stack if path]
    segment = custom.get(SEGMENT)
    return replace(
        op,
        module=modules[-1] if modules else "",
        source=_source(node),
        tag=building.tagger.tag(op, modules, custom.get(SCOPE), custom.get(DEFAULT)),
        segment=None if segment is None else int(segment),
        grad=custom.get(GRAD) is None,
        autocast=custom.get(AUTOCAST, ""),
    )


def _source(node: fx.Node) -> str:
    return user_line_of_stack(node.meta.get("stack_trace") or "")


def _with_effects(op: Op, node: fx.Node, building: _Building) -> Op:
    if op.target.startswith("function."):
        return _with_effects_of_call(op, building)
    draws = num_draws(op, node)
    if draws:
        op = replace(op, random=building.num_draws)
        building.num_draws += draws
    if not isinstance(node.target, OpOverload):
        return op
    return replace(op, writes=_writes(op, node.target), views=_views(op, node.target))


def _with_effects_of_call(op: Op, building: _Building) -> Op:
    """A custom autograd function: capture has seen what it does."""
    call = building.calls[int(op.target.removeprefix("function.call_"))]
    building.functions[op.target] = call
    draw = building.num_draws if call.num_draws else None
    building.num_draws += call.num_draws
    tensors = op.args[0]
    assert isinstance(tensors, tuple)

    def names(places: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for place in places for name in _ref_names(tensors[place])))

    return replace(op, random=draw, writes=names(call.writes), views=names(call.views))


def _writes(op: Op, target: Any) -> tuple[str, ...]:
    written = [
        argument_at(op, place, arg.name)
        for place, arg in enumerate(target._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    ]
    if op.target in _HIDDEN_WRITES:
        places, flag = _HIDDEN_WRITES[op.target]
        written += [argument_at(op, place, "") for place in places] if argument_at(op, flag, "training") else []
    return tuple(dict.fromkeys(name for arg in written for name in _ref_names(arg)))


def _views(op: Op, target: Any) -> tuple[str, ...]:
    aliases = any(result.alias_info is not None for result in target._schema.returns)
    if not aliases and not op.target.startswith(_HIDDEN_VIEWS):
        return ()
    viewed = [
        argument_at(op, place, arg.name)
        for place, arg in enumerate(target._schema.arguments)
        if arg.alias_info is not None or op.target.startswith(_HIDDEN_VIEWS)
    ]
    return tuple(dict.fromkeys(name for arg in viewed for name in _ref_names(arg)))


def _ref_names(argument: Argument) -> list[str]:
    names: list[str] = []
    map_refs(argument, lambda name: names.append(name) or Ref(name))
    return names


def _outputs(exported: Exported, building: _Building) -> tuple[Output, ...]:
    results = next(node for node in exported.program.graph.nodes if node.op == "output").args[0]
    return tuple(
        Output(part.role, part.value if part.place is None else _argument(results[part.place], building))
        for part in exported.marks.parts
    )
