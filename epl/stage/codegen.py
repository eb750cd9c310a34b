"""A stage of a graph as a plain Python function: no interpreter and no dispatch layer in the hot path.

    def stage_0(p_w, p_b, in_x, reseed):
        linear = aten_linear_default(in_x, p_w, p_b)  # net.py:12 fc1
        reseed(0)
        dropout = aten_dropout_default(linear, 0.1, True)
        del linear
        return (dropout,)

Every value is deleted after its last use, as torch.fx's own code generator does, so that memory is what autograd keeps.
Recompute segments become inner functions that run under ``torch.utils.checkpoint``; random operators are preceded by
``reseed(draw)``, so the numbers depend on the step, the part of the batch and the operator, never on the placement.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from epl.errors import RunError
from epl.ir.graph import Argument, Op
from epl.ir.text import argument_text
from epl.stage.leases import Leases

__all__ = ["SCRATCH", "Segments", "StageCode", "autocast", "generate_code", "resolve", "same_branch"]


SCRATCH = "recompute.scratch"  # its argument, but for a second run a copy of it


@dataclass(frozen=True)
class StageCode:
    """The source of one stage's function, and what it needs to run.

    Args:
        name: Name of the function, and of the file that tracebacks show.
        source: Python text.
        targets: Name in the source -> target of the IR.
        ops: The operators, for messages; ``lines[n]`` is the place in ``ops`` of source line n.
        lines: Source line -> place in ``ops``.
        arguments: The values that the function takes, in order; ``reseed`` comes after them.
    """

    name: str
    source: str
    targets: tuple[tuple[str, str], ...]
    ops: tuple[Op, ...]
    lines: tuple[tuple[int, int], ...]
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"<epl {self.name}>"

    def compile(
        self,
        functions: Mapping[str, Callable[..., Any]],
        segments: Segments | None = None,
        leases: Leases | None = None,
    ) -> Callable[..., tuple[Any, ...]]:
        """The function itself; ``functions`` are the callables that the graph names.

        Args:
            functions: By target.
            segments: How recompute segments run.
            leases: What keeps leased weights out of autograd's memory; None if there are none.
        """
        segments = segments or Segments()
        space: dict[str, Any] = {
            "torch": torch,
            "no_grad": torch.no_grad,
            "autocast": autocast,
            "recompute": segments.run,
            SCRATCH.replace(".", "_"): segments.scratch,
        }
        for name, target in self.targets:
            if target != SCRATCH:
                space[name] = functions[target] if target in functions else resolve(target)
        # so that a traceback shows the generated line
        linecache.cache[self.file] = (len(self.source), None, self.source.splitlines(keepends=True), self.file)
        exec(compile(self.source, self.file, "exec"), space)
        return space[self.name] if leases is None else leases.around(space[self.name])

    def op_at(self, line: int) -> Op | None:
        """The operator on a line of the source."""
        place = dict(self.lines).get(line)
        return None if place is None else self.ops[place]


class Segments:
    """How recompute segments run; one for all stages of a model on a rank.

    ``keep_all`` is the switch with which nothing is computed again, to compare with; ``is_again`` tells that a segment is
    running once more.
    """

    def __init__(self) -> None:
        self.keep_all = False
        self.is_again = False

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a segment; keep its arguments, and run it again when backward needs what it has made."""
        if self.keep_all:
            return function(*args)
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
            context_fn=lambda: (nullcontext(), self._running_again()),
        )

    @contextmanager
    def _running_again(self) -> Iterator[None]:
        self.is_again = True
        try:
            yield
        finally:
            self.is_again = False

    def scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it that the second run may change."""
        return tensor.clone() if self.is_again else tensor


def resolve(target: str) -> Callable[..., Any]:
    """What a target of the IR calls."""
    space, _, name = target.partition(".")
    if target == "aten._assert_scalar.default":
        return same_branch
    if space == "python":
        return getattr(operator, name, None) or getattr(torch, name)
    return getattr(getattr(getattr(torch.ops, space), name.split(".")[0]), name.split(".")[1])


def same_branch(holds: bool, message: str) -> None:
    """The check that a branch on data goes the way it went when the model was captured."""
    if not holds:
        raise RunError(
            f"a branch of the model on a tensor's value went another way than when it was captured: {message}"
        )


@contextmanager
def autocast(settings: str) -> Iterator[None]:
    """``cpu:bfloat16,cuda:``: on for one kind of device, and off for another."""
    with ExitStack() as stack:
        for setting in settings.split(","):
            device, _, dtype = setting.partition(":")
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype, None), enabled=bool(dtype)))
        yield


def generate_code(name: str, ops: tuple[Op, ...], arguments: tuple[str, ...], results: tuple[str, ...]) -> StageCode:
    """The function that runs ``ops``.

    Args:
        name: Name of the function.
        ops: The stage's operators, in order.
        arguments: Names of the values it takes, in order; ``reseed`` is added.
        results: Names of the values it gives, in order.
    """
    writer = _Writer(ops, arguments, results)
    writer.body()
    head = f"def {name}({', '.join([*arguments, 'reseed'])}):\n"
    tail = f"    return ({''.join(f'{result}, ' for result in results)})\n"
    lines = tuple((line + 1, place) for line, place in writer.lines)
    return StageCode(
        name, head + "".join(writer.text) + tail, tuple(sorted(writer.targets.items())), ops, lines, arguments
    )


class _Writer:
    """Writes operators as lines and remembers which line is which operator."""

    def __init__(self, ops: tuple[Op, ...], arguments: tuple[str, ...], results: tuple[str, ...]) -> None:
        self.ops, self.arguments, self.results = ops, arguments, results
        self.text: list[str] = []
        self.targets: dict[str, str] = {}
        self.lines: list[tuple[int, int]] = []
        self.place_of = {op.name: place for place, op in enumerate(ops)}
        self.last_use = {name: place for place, op in enumerate(ops) for name in op.reads}

    def body(self) -> None:
        for segment, run in _runs(self.ops, lambda op: op.segment):
            if segment is None:
                self._plain(run, "    ")
            else:
                self._segment(run)

    def _line(self, indent: str, code: str) -> None:
        self.text.append(f"{indent}{code}\n")

    def _plain(self, ops: list[Op], indent: str) -> None:
        for grad, run in _runs(ops, lambda op: op.grad):
            inner = indent
            if not grad:
                self._line(indent, "with no_grad():")
                inner = indent + "    "
            for setting, part in _runs(run, lambda op: op.autocast):
                deeper = inner
                if setting:
                    self._line(inner, f"with autocast({setting!r}):")
                    deeper = inner + "    "
                for op in part:
                    self._op(op, deeper)

    def _op(self, op: Op, indent: str) -> None:
        if op.random is not None:
            self._line(indent, f"reseed({op.random})")
        name = op.target.replace(".", "_")
        self.targets[name] = op.target
        parts = [_code(arg) for arg in op.args] + [f"{key}={_code(value)}" for key, value in op.kwargs]
        place = self.place_of[op.name]
        self.lines.append((len(self.text) + 1, place))
        comment = f"  # {op.source} {op.module}".rstrip()
        self._line(indent, f"{op.name} = {name}({', '.join(parts)}){comment}")
        self._delete(self._dead_after(place), indent)

    def _dead_after(self, place: int) -> list[str]:
        op = self.ops[place]
        dead = [name for name in op.reads if self.last_use[name] == place and self._may_delete(name)]
        return dead + [op.name] * (op.name not in self.last_use and op.name not in self.results)

    def _may_delete(self, name: str) -> bool:
        return name in self.place_of and name not in self.results

    def _delete(self, names: Iterable[str], indent: str) -> None:
        names = list(names)
        if names:
            self._line(indent, f"del {', '.join(names)}")

    def _root(self, name: str) -> str:
        """The value in whose memory a value lives, as far as the stage knows."""
        while name in self.place_of and (views := self.ops[self.place_of[name]].views):
            name = views[0]
        return name

    def _segment(self, ops: list[Op]) -> None:
        """An inner function with exactly the values it needs, run under checkpoint."""
        made = [op.name for op in ops]
        end = self.place_of[ops[-1].name]
        read = dict.fromkeys(name for op in ops for name in op.reads if name not in made)
        # What lives in the memory of the stage's own arguments (weights, buffers) is not passed through the checkpoint,
        # which would insist that it stays unchanged: running statistics do not. It is bound when the segment is defined.
        bound = [name for name in read if name not in self.arguments and self._root(name) in self.arguments]
        takes = [name for name in read if name not in self.arguments and name not in bound]
        gives = [name for name in made if name in self.results or self.last_use.get(name, -1) > end]
        label = f"segment_{ops[0].segment}_{self.place_of[ops[0].name]}"
        self._line("    ", f"def {label}({', '.join([*takes, *(f'{name}={name}' for name in bound)])}):")
        kept, self.results = self.results, (*self.results, *gives, *takes, *bound)
        self._plain(ops, "        ")
        self.results = kept
        self._line("        ", f"return ({''.join(f'{name}, ' for name in gives)})")
        self._line("    ", f"({''.join(f'{name}, ' for name in gives)}) = recompute({', '.join([label, *takes])})")
        self._delete(
            (name for name in (*takes, *bound) if self.last_use[name] <= end and self._may_delete(name)), "    "
        )


def _runs(ops: Iterable[Op], key: Callable[[Op], Any]) -> Iterator[tuple[Any, list[Op]]]:
    return ((value, list(run)) for value, run in groupby(ops, key))


def _code(argument: Argument) -> str:
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float({str(argument)!r})"
    return argument_text(argument)
