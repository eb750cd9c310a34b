"""Build: put every operator of an annotated graph into a TaskGraph.

1. Tagged operators go where the user put them; TaskGraphs are numbered in the order in which the program reaches them.
2. Untagged operators go where dataflow puts them: into the latest TaskGraph that feeds them; what is fed by none (the
   embedding of a decoder, say) into the earliest that uses it.
3. Untagged operators that need only the batch and constants (attention masks, positions, rotary angles) are copied into
   each TaskGraph that uses them: every rank has the batch, so nothing has to travel.
4. A value that is changed in place lives in one TaskGraph; a TaskGraph that would change another one's value (or the
   user's batch) changes a copy.

Source: EPL attributes operators to TaskGraphs by scope; steps 2 to 4 are what a captured dataflow graph adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from epl.errors import StrategyError, bulleted
from epl.ir.graph import Argument, Graph, Op, Ref, StrategySpec, map_refs
from epl.ir.verify import verify
from epl.planner.mutation import copy_before_foreign_writes, mutation_groups

__all__ = ["build_taskgraphs"]


def build_taskgraphs(graph: Graph, *, colocate: bool = False, tasks: tuple[StrategySpec, ...] | None = None) -> Graph:
    """The graph with every operator in a TaskGraph.

    Args:
        graph: The annotated graph that capture gave.
        colocate: True if all TaskGraphs share the same devices, so that dataflow may return to an earlier one.
        tasks: The TaskGraphs of the plan, for another graph of the same model; None to take the graph's own.

    Raises:
        StrategyError: the graph has a TaskGraph that the plan does not know, or the model returns to an earlier
            TaskGraph on other devices; names both modules.
    """
    graph = _without_dead_ops(graph)
    if tasks is None:
        tasks = graph.strategies or (StrategySpec("replicate", 1, "model"),)
    else:
        graph = _with_tags_of(graph, tasks)
    free = _free_ops(graph)
    places = _place(graph, free)
    graph = replace(graph, tasks=tasks, ops=_placed(graph, places, free))
    graph = copy_before_foreign_writes(graph)
    if not colocate:
        _refuse_returns(graph)
        _refuse_shared_state(graph)
    return verify(graph, after="building TaskGraphs")


def _with_tags_of(graph: Graph, tasks: tuple[StrategySpec, ...]) -> Graph:
    """The graph with its tags renumbered to the plan's TaskGraphs; equal strategies are matched in order."""
    numbers: list[int] = []
    for spec in graph.strategies:
        place = next((i for i, known in enumerate(tasks) if known == spec and i not in numbers), None)
        if place is None:
            raise StrategyError(
                f"a batch of this kind enters {spec.kind}({spec.device_count}, name={spec.name!r}) made at {spec.where}, "
                "which the plan does not know: the first batch did not enter it. Let every batch enter the same scopes."
            )
        numbers.append(place)
    ops = tuple(replace(op, tag=None if op.tag is None else numbers[op.tag]) for op in graph.ops)
    return replace(graph, ops=ops, strategies=tasks)


def _without_dead_ops(graph: Graph) -> Graph:
    """Drop what nothing uses: values that the step's parts do not need (the logits beside a loss, for example)."""
    needed = set(graph.output_names)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        has_effect = bool(op.writes) or op.target.startswith(("aten._assert", "function."))
        if op.name in needed or has_effect:
            kept.append(op)
            needed.update(op.reads)
    live = tuple(reversed(kept))
    used = {name for op in live for name in op.reads} | set(graph.output_names)
    return replace(graph, ops=live, constants=tuple(leaf for leaf in graph.constants if leaf.name in used))


def _free_ops(graph: Graph) -> set[str]:
    """Untagged operators that need only the batch, constants and unchanging buffers, and draw no random numbers."""
    written = {name for op in graph.ops for name in op.writes}
    known = {leaf.name for leaf in (*graph.inputs, *graph.constants)}
    known |= {leaf.name for leaf in graph.buffers if leaf.name not in written}
    free: set[str] = set()
    for op in graph.ops:
        if (
            op.tag is None
            and op.random is None
            and not op.target.startswith("function.")
            and known.issuperset(op.reads)
        ):
            free.add(op.name)
            known.add(op.name)
    # a value that is changed in place is copied together with all that touches it, or not at all
    for group in mutation_groups(graph):
        if not group <= free:
            free -= _fed_by(graph, group & free)
    return free


def _fed_by(graph: Graph, names: Iterable[str]) -> set[str]:
    """The operators of these names and all that depend on them."""
    reached = set(names)
    for op in graph.ops:
        if not reached.isdisjoint(op.reads):
            reached.add(op.name)
    return reached


def _place(graph: Graph, free: set[str]) -> dict[str, int]:
    """TaskGraph of each operator that is not free."""
    places = {op.name: op.tag for op in graph.ops if op.tag is not None and op.name not in free}
    for op in graph.ops:  # latest feeder
        if op.name not in places and op.name not in free:
            feeders = [places[name] for name in op.reads if name in places]
            if feeders:
                places[op.name] = max(feeders)
    for op in reversed(graph.ops):  # earliest user
        if op.name not in places and op.name not in free:
            users = [places[reader.name] for reader in graph.readers.get(op.name, ()) if reader.name in places]
            places[op.name] = min(users, default=0)
    _keep_lists_whole(graph, places)
    _keep_mutations_together(graph, places)
    return places


def _keep_lists_whole(graph: Graph, places: dict[str, int]) -> None:
    """``getitem`` stays with the operator whose results it picks, so that only tensors cross."""
    for op in graph.ops:
        if op.target == "python.getitem" and op.name in places and isinstance(op.args[0], Ref):
            places[op.name] = places.get(op.args[0].name, places[op.name])


def _keep_mutations_together(graph: Graph, places: dict[str, int]) -> None:
    """Untagged operators on a value that changes in place stay where the value is made."""
    for group in mutation_groups(graph):
        ops = [op for op in graph.ops if op.name in group and op.name in places]
        for op in ops[1:]:
            if op.tag is None:
                places[op.name] = max(places[op.name], places[ops[0].name])


def _placed(graph: Graph, places: dict[str, int], free: set[str]) -> tuple[Op, ...]:
    """The operators with their TaskGraphs; free ones once in each TaskGraph that uses them, under a name of its own."""
    users = _users_of_free(graph, places, free)
    ops: list[Op] = []
    for op in graph.ops:
        tasks = sorted(users[op.name]) if op.name in free else [places[op.name]]
        for task in tasks:
            ops.append(_in_task(op, task, users))
    return tuple(ops)


def _users_of_free(graph: Graph, places: dict[str, int], free: set[str]) -> dict[str, set[int]]:
    """The TaskGraphs that use each free operator; an output that nothing else uses counts for the last one."""
    last = max(places.values(), default=0)
    users: dict[str, set[int]] = {name: set() for name in free}
    for name in graph.output_names:
        if name in free:
            users[name].add(last)
    for op in graph.ops:
        if op.name in free and op.target.startswith("aten._assert"):
            users[op.name].add(0)
    groups = [group for group in mutation_groups(graph) if group <= free]
    while _spread_users(graph, places, users, groups):
        pass  # a group's members come to be used together, which may reach operators before them
    return users


def _spread_users(
    graph: Graph, places: dict[str, int], users: dict[str, set[int]], groups: list[frozenset[str]]
) -> bool:
    """One sweep from users to makers; True if anything changed."""
    before = sum(map(len, users.values()))
    for op in reversed(graph.ops):
        tasks = users.get(op.name) or ({places[op.name]} if op.name in places else set())
        for name in op.reads:
            if name in users:
                users[name] |= tasks
    for group in groups:
        together = set().union(*(users[name] for name in group))
        for name in group:
            users[name] |= together
    return sum(map(len, users.values())) != before


def _in_task(op: Op, task: int, users: dict[str, set[int]]) -> Op:
    def name_in(name: str) -> str:
        return f"{name}_t{task}" if name in users and users[name] and task != min(users[name]) else name

    def rename(name: str) -> Argument:
        return Ref(name_in(name))

    return replace(
        op,
        name=name_in(op.name),
        task=task,
        args=tuple(map_refs(arg, rename) for arg in op.args),
        kwargs=tuple((key, map_refs(value, rename)) for key, value in op.kwargs),
        writes=tuple(map(name_in, op.writes)),
        views=tuple(map(name_in, op.views)),
    )


def _refuse_returns(graph: Graph) -> None:
    found: dict[tuple[str, str], str] = {}
    for op in graph.ops:
        for name in op.reads:
            maker = graph.op_by_name.get(name)
            if maker is not None and (maker.task or 0) > (op.task or 0):
                found.setdefault((maker.module, op.module), _return_line(graph, maker, op))
    if found:
        raise StrategyError(
            bulleted(
                "the model returns to an earlier TaskGraph on other devices. Move the modules into TaskGraphs in the order "
                "in which they run, or share the devices (cluster.colocate_split_and_replicate):",
                list(found.values()),
            )
        )


def _return_line(graph: Graph, maker: Op, user: Op) -> str:
    def at(op: Op) -> str:
        spec = graph.tasks[op.task or 0]
        return (
            f"module {op.module or 'the model itself'} in TaskGraph {op.task} ({spec.name}, {spec.where}; {op.source})"
        )

    return f"{at(maker)} feeds {at(user)}"


def _refuse_shared_state(graph: Graph) -> None:
    """A buffer or parameter that forward changes must be used in one TaskGraph only: there is one truth of it."""
    users: dict[str, set[int]] = {}
    written: dict[str, Op] = {}
    for op in graph.ops:
        for name in op.reads:
            users.setdefault(name, set()).add(op.task or 0)
        written.update(dict.fromkeys(op.writes, op))
    held = {leaf.name: leaf.path for leaf in (*graph.buffers, *graph.parameters)}
    faults = [
        f"{held[name]} is changed at {op.source} and used in TaskGraphs {sorted(users[name])}"
        for name, op in written.items()
        if name in held and len(users[name]) > 1
    ]
    if faults:
        raise StrategyError(
            bulleted("forward changes state that several TaskGraphs use; keep all its uses in one of them:", faults)
        )
