"""The text form of a graph, one line an item, that reads like Python and parses back to the same graph.

    x = input('i64[4, 8]', path='input_ids')
    w = parameter('f32[16, 60]', path='head.weight')
    task(0, kind='replicate', device_count=1, name='stage_0', where='train.py:12')
    linear = aten.linear.default(x, w)  # 'f32[4, 60]' task=0 module='head' source='net.py:7'
    output('loss', mean)

Lines are Python expressions, so that Python's own parser reads them (``ast``): names are values, all else is a constant.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any, cast

import torch

from epl.errors import GraphError
from epl.ir.graph import Argument, Buffer, Constant, Graph, Input, Op, Output, Parameter, Ref, StrategySpec, Taken
from epl.ir.types import TensorType, parse_type

__all__ = ["argument_text", "op_text", "parse", "to_text"]

_OP_FIELDS = ("task", "tag", "module", "source", "writes", "views", "random", "segment", "grad", "autocast")
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def to_text(graph: Graph) -> str:
    """The graph as text; ``parse(to_text(graph)) == graph``."""
    lines = [f"strategy({_spec_text(spec)})" for spec in graph.strategies]
    lines += [f"task({_spec_text(spec)})" for spec in graph.tasks]
    lines += [f"{leaf.name} = input('{leaf.type}', path={leaf.path!r})" for leaf in graph.inputs]
    lines += [
        f"{leaf.name} = parameter('{leaf.type}', path={leaf.path!r}, trainable={leaf.trainable}, "
        f"aliases={leaf.aliases!r})"
        for leaf in graph.parameters
    ]
    lines += [
        f"{leaf.name} = buffer('{leaf.type}', path={leaf.path!r}, persistent={leaf.persistent})"
        for leaf in graph.buffers
    ]
    lines += [f"{leaf.name} = constant('{leaf.type}')" for leaf in graph.constants]
    lines += [f"{leaf.name} = taken('{leaf.type}', needs_grad={leaf.needs_grad})" for leaf in graph.taken]
    lines += [op_text(op) for op in graph.ops]
    lines += [f"output({out.role!r}, {argument_text(out.value)})" for out in graph.outputs]
    return "\n".join(lines) + "\n"


def _spec_text(spec: StrategySpec) -> str:
    rest = ", is_default=True" if spec.is_default else ""
    rest += f", placements={spec.placements!r}" if spec.placements else ""
    return f"kind={spec.kind!r}, device_count={spec.device_count}, name={spec.name!r}, where={spec.where!r}{rest}"


def op_text(op: Op) -> str:
    """One operator as one line."""
    parts = [argument_text(arg) for arg in op.args] + [f"{key}={argument_text(value)}" for key, value in op.kwargs]
    defaults = Op("", op.type, "")
    notes = [f"'{op.type}'"]
    notes += [f"{name}={getattr(op, name)!r}" for name in _OP_FIELDS if getattr(op, name) != getattr(defaults, name)]
    return f"{op.name} = {op.target}({', '.join(parts)})  # {' '.join(notes)}"


def argument_text(argument: Argument) -> str:
    """An argument as the Python expression that stands for it."""
    if isinstance(argument, Ref):
        return argument.name
    if isinstance(argument, tuple):
        return "[" + ", ".join(map(argument_text, argument)) + "]"
    if isinstance(argument, torch.device):
        return f"torch.device({str(argument)!r})"
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float({str(argument)!r})"
    if isinstance(argument, _TORCH_CONSTANTS):
        return str(argument)
    return repr(argument)


def parse(text: str) -> Graph:
    """The graph that `to_text` wrote.

    Raises:
        GraphError: a line is not an item of a graph; the message gives its number and the line.
    """
    found: dict[str, list[Any]] = {key: [] for key in ("strategy", "task", "leaf", "op", "output")}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            kind, item = _parse_line(line)
        except (SyntaxError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise GraphError(f"line {number} is not an item of a graph ({error}): {line.strip()}") from error
        found[kind].append(item)
    leaves = found["leaf"]
    return Graph(
        inputs=tuple(leaf for leaf in leaves if isinstance(leaf, Input)),
        parameters=tuple(leaf for leaf in leaves if isinstance(leaf, Parameter)),
        buffers=tuple(leaf for leaf in leaves if isinstance(leaf, Buffer)),
        constants=tuple(leaf for leaf in leaves if isinstance(leaf, Constant)),
        taken=tuple(leaf for leaf in leaves if isinstance(leaf, Taken)),
        ops=tuple(found["op"]),
        outputs=tuple(found["output"]),
        strategies=tuple(found["strategy"]),
        tasks=tuple(found["task"]),
    )


def _parse_line(line: str) -> tuple[str, Any]:
    statement = ast.parse(line.strip()).body[0]
    # what follows the statement is a comment to Python, and an operator's notes to us
    notes = line.strip().encode()[statement.end_col_offset :].decode().strip(" #")
    if isinstance(statement, ast.Expr):
        return _parse_call(cast(ast.Call, statement.value))
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        raise ValueError("neither a call nor an assignment")
    call = cast(ast.Call, statement.value)
    name, target = statement.targets[0].id, ast.unparse(call.func)
    if target in _LEAVES:
        kind = cast(TensorType, parse_type(ast.literal_eval(call.args[0])))
        fields = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return "leaf", _LEAVES[target](name, kind, **fields)
    args = tuple(_argument(arg) for arg in call.args)
    kwargs = tuple((str(word.arg), _argument(word.value)) for word in call.keywords)
    type_text, fields = _parse_notes(notes)
    return "op", Op(name, parse_type(type_text), target, args, kwargs, **fields)


_LEAVES = {"input": Input, "parameter": Parameter, "buffer": Buffer, "constant": Constant, "taken": Taken}


def _parse_call(call: ast.Call) -> tuple[str, Any]:
    kind = ast.unparse(call.func)
    if kind == "output":
        return "output", Output(ast.literal_eval(call.args[0]), _argument(call.args[1]))
    if kind not in ("strategy", "task"):
        raise ValueError(f"unknown item {kind!r}")
    return kind, StrategySpec(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})


def _parse_notes(notes: str) -> tuple[str, dict[str, Any]]:
    """``'f32[4]' task=0 module='head'`` as a type and fields."""
    match = re.match(r"'([^']*)'\s*", notes)
    if match is None:
        raise ValueError("an operator's line ends in '# TYPE ...'")
    # the notes are the keywords of a call without commas: find each ``name=`` that stands outside quotes and brackets
    pieces = re.findall(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\([^)]*\)|\S+)", notes[match.end() :])
    unknown = [name for name, _ in pieces if name not in _OP_FIELDS]
    if unknown:
        raise ValueError(f"unknown notes {unknown}; known are {_OP_FIELDS}")
    return match[1], {name: ast.literal_eval(value) for name, value in pieces}


def _argument(node: ast.expr) -> Argument:
    if isinstance(node, ast.Name):
        return Ref(node.id)
    if isinstance(node, ast.List):
        return tuple(_argument(item) for item in node.elts)
    if isinstance(node, ast.Attribute):
        value = getattr(torch, node.attr)
        if not isinstance(value, _TORCH_CONSTANTS):
            raise ValueError(f"{ast.unparse(node)} is not a constant of torch")
        return value
    if isinstance(node, ast.Call):
        maker = ast.unparse(node.func)
        text = ast.literal_eval(node.args[0])
        return torch.device(text) if maker == "torch.device" else float(text)
    return ast.literal_eval(node)
