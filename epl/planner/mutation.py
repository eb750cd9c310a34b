"""Values that are changed in place, where a graph is cut: TaskGraphs on several devices share no memory.

The batch belongs to the user, so what forward would change of it is copied first (`with_own_inputs`). A value that is
made in one TaskGraph and changed in another becomes a copy there, which later readers read; a value that its own
TaskGraph changes after another one has used it is copied for that one before the change. What the model keeps (buffers)
lives in the one TaskGraph that changes it, and goes to later ones as copies (`separate_storages`):

    T0  a = f(x)                       T0  a = f(x)
    T1  b = g(a)                       T0  a_1 = clone(a)
    T0  a += 1               ->        T1  b = g(a_1)
    T1  a *= 2                         T0  a += 1
    T2  c = h(a)                       T1  a_2 = clone(a); a_2 *= 2
                                       T2  c = h(a_2)

Where views of one memory are spread over TaskGraphs so that no copy can stand in for it, the model is refused; also where
several TaskGraphs change what the model keeps, or one uses what a later one changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from epl.errors import StrategyError, bulleted
from epl.ir.graph import Graph, Op, Ref, map_refs
from epl.ir.rename import renamed
from epl.ir.types import ScalarType, Type

__all__ = ["mutation_groups", "separate_storages", "with_own_inputs"]


def mutation_groups(graph: Graph) -> list[frozenset[str]]:
    """Sets of operators whose results share a storage that some operator changes in place."""
    root = graph.storage_roots
    groups: dict[str, set[str]] = {name: set() for name in graph.written}
    for op in graph.ops:
        for name in {root[op.name], *(root[written] for written in op.writes)}:
            if name in groups:
                groups[name].add(op.name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]


def with_own_inputs(graph: Graph) -> Graph:
    """The graph with a copy in place of each tensor of the batch that forward changes."""
    changed = [leaf.name for leaf in graph.inputs if leaf.name in graph.written]
    if not changed:
        return graph
    names = _Names(graph)
    copies = {name: names.new(name) for name in changed}
    clones = [
        Op(copy, graph.type_of(name), "aten.clone.default", (Ref(name),), source=graph.written[name][0].source)
        for name, copy in copies.items()
    ]
    ops = (*clones, *(renamed(op, copies) for op in graph.ops))
    outputs = tuple(replace(out, value=map_refs(out.value, lambda n: Ref(copies.get(n, n)))) for out in graph.outputs)
    return replace(graph, ops=ops, outputs=outputs)


def separate_storages(graph: Graph) -> Graph:
    """The graph with copies, so that no TaskGraph changes another one's memory.

    Raises:
        StrategyError: views of one memory are in several TaskGraphs, and a change in one would have to show in another.
    """
    return _Separation(graph).run()


class _Names:
    """New names, none of which the graph has."""

    def __init__(self, graph: Graph) -> None:
        self._taken = {*graph.leaves, *graph.op_by_name}

    def new(self, name: str) -> str:
        number = next(n for n in range(1, len(self._taken) + 2) if f"{name}_{n}" not in self._taken)
        self._taken.add(f"{name}_{number}")
        return f"{name}_{number}"


@dataclass
class _Memory:
    """A piece of memory in one TaskGraph.

    Args:
        task: The TaskGraph.
        epoch: How many changes of the value it has seen.
        whole: The name of the whole value in it; None if it holds a copy of a view only.
        is_fixed: True for a copy that was made for another TaskGraph to read.
    """

    task: int | None
    epoch: int = 0
    whole: str | None = None
    is_fixed: bool = False


class _Separation:
    """Follows each changing value through the program: which memory holds its present state."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._root = graph.storage_roots
        self._names = _Names(graph)
        self._types: dict[str, Type] = {}
        self._memory: dict[str, _Memory] = {}
        self._present: dict[str, _Memory] = {}  # root -> the memory that was changed last
        self._writer: dict[str, Op] = {}  # root -> what has changed it
        self._copies: dict[tuple[int | None, str], str] = {}  # what a TaskGraph uses in place of a value
        self._ops: list[Op] = []
        self._shared = self._find_shared()
        for root in self._shared & graph.leaves.keys():
            self._present[root] = self._memory[root] = _Memory(graph.written[root][0].task, whole=root)
        self._writes_left = Counter((root, writer.task) for root in self._shared for writer in graph.written[root])

    def _find_shared(self) -> set[str]:
        """The roots that change, and that more than one TaskGraph touches."""
        tasks: dict[str, set[int]] = defaultdict(set)
        for op in self._graph.ops:
            for name in (op.name, *op.reads):
                tasks[self._root[name]].add(op.task or 0)
        self._refuse_shared_state(tasks)
        return {root for root in self._graph.written if len(tasks[root]) > 1}

    def _refuse_shared_state(self, tasks: dict[str, set[int]]) -> None:
        """There is one truth of what the model keeps, and it is where it is changed."""
        held = {leaf.name: leaf.path for leaf in (*self._graph.buffers, *self._graph.parameters)}
        held |= {leaf.name: f"a tensor of type {leaf.type}, no buffer," for leaf in self._graph.constants}
        faults = [
            f"{held[name]} is changed at {writers[-1].source} and used in TaskGraphs {sorted(tasks[name])}"
            for name, writers in self._graph.written.items()
            if name in held
            and (len({writer.task for writer in writers}) > 1 or min(tasks[name]) < (writers[0].task or 0))
        ]
        if faults:
            raise StrategyError(
                bulleted(
                    "forward changes state that several TaskGraphs use; keep all its uses in one of them, or the change "
                    "before the other uses:",
                    faults,
                )
            )

    def run(self) -> Graph:
        if not self._shared:
            return self._graph
        for op in self._graph.ops:
            names = {name: self._ready(op, name) for name in op.reads if self._root[name] in self._shared}
            self._ops.append(renamed(op, names))
            self._note_result(op, names)
            self._note_writes(op, names)
        end = Op("", ScalarType("none"), "the step's result")
        outputs = tuple(
            replace(out, value=map_refs(out.value, lambda name: Ref(self._current(end, name))))
            for out in self._graph.outputs
        )
        return replace(self._graph, ops=tuple(self._ops), outputs=outputs)

    def _ready(self, op: Op, name: str) -> str:
        """The name under which ``op`` gets the present state of a value, copied first if need be."""
        now, root = self._current(op, name), self._root[name]
        memory = self._memory[now]
        if memory.task == op.task:
            return now
        makes_view = self._root[op.name] == root
        if name in op.writes or (makes_view and self._writes_left[(root, op.task)]):
            self._copies[(op.task, name)] = self._copy(now, op, op.task)
        elif now in self._graph.leaves or (self._writes_left[(root, memory.task)] and not memory.is_fixed):
            self._copies[(op.task, name)] = self._copy(now, op, memory.task, is_fixed=True)
        else:
            return now
        return self._copies[(op.task, name)]

    def _current(self, op: Op, name: str) -> str:
        """Where the present state of a value is."""
        root = self._root[name]
        if root not in self._shared:
            return name
        now = self._copies.get((op.task, name), name)
        present = self._present[root]
        if self._memory[now].epoch == present.epoch:
            return now
        if name != root or present.whole is None:
            raise StrategyError(self._refusal(op, name))
        return present.whole

    def _copy(self, name: str, op: Op, task: int | None, *, is_fixed: bool = False) -> str:
        copy = self._names.new(name)
        self._types[copy] = self._types[name] if name in self._types else self._graph.type_of(name)
        clone = Op(copy, self._types[copy], "aten.clone.default", (Ref(name),), task=task)
        self._ops.append(replace(clone, module=op.module, source=op.source))
        memory = self._memory[name]
        is_whole = memory.whole == name
        self._memory[copy] = _Memory(task, memory.epoch, copy if is_whole else None, is_fixed)
        return copy

    def _note_result(self, op: Op, names: dict[str, str]) -> None:
        """Where the result of an operator lives."""
        root = self._root[op.name]
        if root not in self._shared:
            return
        if root == op.name:
            self._present[root] = self._memory[op.name] = _Memory(op.task, whole=op.name)
            return
        viewed = self._memory[next(now for name, now in names.items() if self._root[name] == root)]
        # a view of another TaskGraph's value is one of what was received
        self._memory[op.name] = viewed if viewed.task == op.task else _Memory(op.task, viewed.epoch, is_fixed=True)

    def _note_writes(self, op: Op, names: dict[str, str]) -> None:
        for root in {self._root[name] for name in op.writes} & self._shared:
            memory = next(self._memory[names[name]] for name in op.writes if self._root[name] == root)
            memory.epoch = self._present[root].epoch + 1
            self._present[root], self._writer[root] = memory, op
            self._writes_left[(root, op.task)] -= 1

    def _refusal(self, op: Op, name: str) -> str:
        writer = self._writer[self._root[name]]
        return (
            f"{writer.target} at {writer.source} (module {writer.module or 'the model'}) changes memory in place in "
            f"TaskGraph {writer.task}, and {op.target} at {op.source or 'the end'} needs to see it in {name}, another view "
            "of that memory. Write the operation out of place (x = x + y instead of x += y)."
        )
