"""Build: put every operator of an annotated graph into a TaskGraph.

1. Tagged operators go where the user put them; TaskGraphs are numbered in the order in which dataflow reaches them.
2. Untagged operators go where dataflow puts them: into the latest TaskGraph that feeds them; what is fed by none (the
   embedding of a decoder, say) into the earliest that uses it.
3. Untagged operators that need only the batch and constants (attention masks, positions, rotary angles) are copied into
   each TaskGraph that uses them: every rank has the batch, so nothing has to travel.
4. A value that is changed in place lives in one TaskGraph; a TaskGraph that would change another one's value (or the
   user's batch) changes a copy (``mutation.py``).

Source: EPL attributes operators to TaskGraphs by scope; steps 2 to 4 are what a captured dataflow graph adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from epl.errors import StrategyError, bulleted
from epl.ir.graph import Argument, Graph, Op, Ref, StrategySpec, map_refs
from epl.ir.verify import verify
from epl.planner.mutation import mutation_groups, separate_storages, with_own_inputs
from epl.planner.strategies import number_strategies, take_numbers_of

__all__ = ["build_taskgraphs"]


def build_taskgraphs(graph: Graph, *, colocate: bool = False, tasks: tuple[StrategySpec, ...] | None = None) -> Graph:
    """The graph with every operator in a TaskGraph.

    Args:
        graph: The annotated graph that capture gave.
        colocate: True if all TaskGraphs share the same devices, so that dataflow may return to an earlier one.
        tasks: The TaskGraphs of the plan, for another graph of the same model; None to take the graph's own.

    Raises:
        StrategyError: a strategy takes no part in the step, the plan does not know one, the model returns to an earlier
            TaskGraph on other devices (names both modules), or TaskGraphs would have to share memory.
    """
    graph = with_own_inputs(_without_dead_ops(graph))
    if tasks is None:
        graph = number_strategies(graph)
        tasks = graph.strategies or (StrategySpec("replicate", 1, "model"),)
    else:
        graph = take_numbers_of(graph, tasks)
    free = _free_ops(graph)
    places = _place(graph, free)
    graph = replace(graph, tasks=tasks, ops=_placed(graph, places, free))
    if not colocate:
        graph = separate_storages(graph)
        _refuse_returns(graph)
    return verify(graph, after="building TaskGraphs", colocated=colocate)


def _without_dead_ops(graph: Graph) -> Graph:
    """Drop what nothing uses: values that the step's parts do not need (the logits beside a loss, for example).

    What is written stays if the model keeps it, or if something needs the memory that is written to.
    """
    roots = graph.storage_roots
    state = {leaf.name for leaf in (*graph.parameters, *graph.buffers, *graph.constants)}
    needed = set(graph.output_names)
    memory = state | {roots[name] for name in needed}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        has_effect = op.target.startswith(("aten._assert", "function."))
        if has_effect or op.name in needed or any(roots[name] in memory for name in op.writes):
            kept.append(op)
            needed.update(op.reads)
            memory.update(roots[name] for name in op.reads)
    live = tuple(reversed(kept))
    used = {name for op in live for name in op.reads} | set(graph.output_names)
    return replace(graph, ops=live, constants=tuple(leaf for leaf in graph.constants if leaf.name in used))


def _free_ops(graph: Graph) -> set[str]:
    """Untagged operators that need only the batch, constants and unchanging buffers, and draw no random numbers."""
    known = {leaf.name for leaf in (*graph.inputs, *graph.buffers, *graph.constants)} - graph.written.keys()
    free: set[str] = set()
    for op in graph.ops:
        is_plain = op.tag is None and op.random is None and not op.target.startswith("function.")
        if is_plain and known.issuperset(op.reads) and free.issuperset(graph.feeders[op.name]):
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
        if not reached.isdisjoint(graph.feeders[op.name]):
            reached.add(op.name)
    return reached


def _place(graph: Graph, free: set[str]) -> dict[str, int]:
    """TaskGraph of each operator that is not free."""
    places = {op.name: op.tag for op in graph.ops if op.tag is not None}
    left = [op for op in graph.ops if op.tag is None and op.name not in free]
    for op in left:  # latest feeder
        feeders = [places[name] for name in graph.feeders[op.name] if name in places]
        if feeders:
            places[op.name] = max(feeders)
    fed: dict[str, list[str]] = {}
    for name, feeders in graph.feeders.items():
        for feeder in feeders:
            fed.setdefault(feeder, []).append(name)
    for op in reversed(left):  # earliest user
        if op.name not in places:
            places[op.name] = min((places[name] for name in fed.get(op.name, ()) if name in places), default=0)
    _keep_lists_whole(graph, places)
    _take_views_to_their_writers(graph, left, places)
    return places


def _take_views_to_their_writers(graph: Graph, ops: list[Op], places: dict[str, int]) -> None:
    """``z[1] = y`` makes a view of z and writes to it: both belong where y is, so that z as a whole is copied there."""
    moved: set[str] = set()
    for op in reversed(ops):
        root = graph.storage_roots[op.name]
        if root == op.name or op.writes or root not in graph.written:
            continue
        readers = graph.readers.get(op.name, ())
        if any(op.name in reader.writes or reader.name in moved for reader in readers):
            places[op.name] = max(places[op.name], min(places[reader.name] for reader in readers))
            moved.add(op.name)


def _keep_lists_whole(graph: Graph, places: dict[str, int]) -> None:
    """``getitem`` stays with the operator whose results it picks, so that only tensors cross."""
    for op in graph.ops:
        if op.target == "python.getitem" and op.name in places and isinstance(op.args[0], Ref):
            places[op.name] = places.get(op.args[0].name, places[op.name])


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
        for name in graph.feeders[op.name]:
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
