"""One rank's part of a graph, as a graph of its own: local types, conversions between placements, and what goes in and out.

    graph, plan -> localize -> Stage -> passes -> Stage -> code

Passes change a `Stage`: what a rank holds and computes is plain to see there, whatever the strategies are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from epl.ir.graph import Graph, Op, Output, Ref, Taken, map_refs, refs_in
from epl.ir.types import TensorType, Type
from epl.planner.split import SplitChoice
from epl.sharding.local import Bindable
from epl.sharding.options import WHOLE
from epl.sharding.placements import Placement, Shard, local_shape
from epl.stage.leases import Lease
from epl.stage.shards import ShardedStage, shard_stage

__all__ = ["GIVEN", "Share", "Stage", "localize"]

GIVEN = "give."  # the role of a result that goes to other stages


@dataclass(frozen=True)
class Stage:
    """What one rank runs for one micro-batch.

    Args:
        graph: Its operators, with the types of what this rank holds. ``graph.taken`` comes from
            other stages; outputs are values for other stages (role ``give.NAME``), then the step's parts.
        functions: What operators with targets such as ``exchange.*`` and ``form.*`` call.
        num_in_flight: Most micro-batches whose forward has run, and whose backward has not.
        num_ranks: Devices that share out its work.
        position: This rank's place among them.
        index: Number of the stage.
        notes: What passes have to say, a line each.
        leases: What operators with targets ``lease.*`` bring.
        runs: The units of weights that leases bring, in the order of forward (:mod:`epl.planner.units`).
        arrivals: The units that operators with targets ``arrive.*`` wait for.
    """

    graph: Graph
    functions: Mapping[str, Bindable] = field(default_factory=dict)
    num_in_flight: int = 1
    num_ranks: int = 1
    position: int = 0
    index: int = 0
    notes: tuple[str, ...] = ()
    leases: Mapping[str, Lease] = field(default_factory=dict)
    runs: tuple[int, ...] = ()
    arrivals: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"stage {self.index}"

    @property
    def results(self) -> tuple[str, ...]:
        """The values that its function returns, in order."""
        return tuple(output.value.name for output in self.graph.outputs if isinstance(output.value, Ref))

    def static_bytes(self, state_factor: float) -> int:
        """Weights, buffers, gradients, and ``state_factor`` bytes of optimizer states for each byte of a trained weight."""
        trained = sum(leaf.type.size_bytes for leaf in self.graph.parameters if leaf.trainable)
        held = sum(leaf.type.size_bytes for leaf in (*self.graph.parameters, *self.graph.buffers))
        return int(held + trained * (1 + state_factor))


@dataclass(frozen=True)
class Share:
    """What one rank is to run of a graph.

    Args:
        ops: The stage's operators, in order.
        gives: Values that go to other stages.
        parts: The step's parts that the stage reports, each a value.
        choice: How its devices share out the work on one batch; None if this rank works alone.
        position: The rank's place among them.
        num_in_flight: Most micro-batches held at once.
        index: Number of the stage.
    """

    ops: tuple[Op, ...]
    gives: tuple[str, ...]
    parts: tuple[Output, ...]
    choice: SplitChoice | None = None
    position: int = 0
    num_in_flight: int = 1
    index: int = 0

    @property
    def num_ranks(self) -> int:
        return 1 if self.choice is None else self.choice.problem.num_ranks

    def stored(self, name: str, kind: TensorType) -> TensorType:
        """What the rank holds of a parameter, buffer or constant."""
        return self._local(kind, WHOLE if self.choice is None else self.choice.stored.get(name, WHOLE))

    def arriving(self, name: str, kind: Type) -> Type:
        """What it gets of a value of another stage."""
        if self.choice is None or not isinstance(kind, TensorType):
            return kind
        return self._local(kind, self.choice.crossing(name))

    def _local(self, kind: TensorType, placement: Placement) -> TensorType:
        if not isinstance(placement, Shard):
            return kind
        return TensorType(kind.dtype, local_shape(kind.sizes, placement, self.num_ranks, self.position))


def localize(graph: Graph, share: Share) -> Stage:
    """The stage of one rank: its share of the whole graph."""
    ops, outputs = share.ops, (*(Output(GIVEN + name, Ref(name)) for name in share.gives), *share.parts)
    sharded = ShardedStage(ops, {}, {})
    if share.choice is not None:
        sharded = shard_stage(graph, share.choice, ops, share.position)
    made = {op.name for op in ops}
    read = {name for op in ops for name in op.reads} | {name for out in outputs for name in refs_in(out.value)}
    taken = tuple(
        Taken(op.name, share.arriving(op.name, op.type), needs_grad=op.name in graph.needs_grad)
        for op in graph.ops
        if op.name in read and op.name not in made
    )
    here = Graph(
        inputs=tuple(leaf for leaf in graph.inputs if leaf.name in read),
        parameters=tuple(replace(p, type=share.stored(p.name, p.type)) for p in graph.parameters if p.name in read),
        buffers=tuple(replace(b, type=share.stored(b.name, b.type)) for b in graph.buffers if b.name in read),
        constants=tuple(replace(c, type=share.stored(c.name, c.type)) for c in graph.constants if c.name in read),
        ops=sharded.ops,
        outputs=tuple(_renamed(output, sharded.names) for output in outputs),
        strategies=graph.strategies,
        tasks=graph.tasks,
        taken=taken,
    )
    return Stage(here, sharded.functions, share.num_in_flight, share.num_ranks, share.position, share.index)


def _renamed(output: Output, names: Mapping[str, str]) -> Output:
    return replace(output, value=map_refs(output.value, lambda name: Ref(names.get(name, name))))
