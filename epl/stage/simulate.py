"""How much memory a stage takes in forward and backward: its own function, run once on fake tensors with a ledger.

    stage, code -> fakes of all it takes -> forward, backward -> Profile

Nothing is modelled: the function that will run is run, with autograd, recomputing and all, and every storage is seen as it
is made and given back. What fakes lack (values, the insides of kernels) comes from stand-ins and trials.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from epl.capture.fakes import Fakes
from epl.capture.ledger import Entry, Ledger
from epl.ir.graph import Parameter, Ref, Taken
from epl.ir.types import ListType, ScalarType, TensorType
from epl.stage.codegen import Segments, StageCode
from epl.stage.leases import Coming, Leases, UnitCache
from epl.stage.stage import GIVEN, Stage
from epl.stage.workspaces import HUNGRY, find_workspaces

__all__ = ["Change", "Given", "StageProfile", "changes_of", "simulate"]

_NUMBERS: dict[str, Any] = {"bool": True, "int": 1, "float": 0.5}
_ASSERTIONS = ("aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_tensor_metadata.default")
_LOSSES = ("loss", "total")


class Change(NamedTuple):
    """One event in the memory of a stage.

    Args:
        kind: ``activation`` (what outlives the forward pass), ``given`` (what does so only to be sent), ``temporary``,
            ``kernel`` (made and given back at once), ``gradient`` (of a parameter, which a temporary becomes) or
            ``returned`` (the same of a value taken).
        size_bytes: Made, or given back if negative.
        name: Of the parameter or the value.
    """

    kind: str
    size_bytes: int
    name: str = ""


class Given(NamedTuple):
    """The memory of a value for other stages.

    Args:
        size_bytes: Of its memory, without what another value has counted.
        is_kept: True if backward needs that memory, too.
        is_copied: True if it is copied when it is sent, since it is not contiguous.
    """

    size_bytes: int
    is_kept: bool
    is_copied: bool


@dataclass(frozen=True)
class StageProfile:
    """The memory of one stage for one micro-batch, beyond what is there before: weights, the batch, what it takes.

    Args:
        forward: The events of the forward pass.
        backward: The events of the first backward pass, which leaves new gradients.
        given: The values for other stages.
        problem: Why there is no profile, if there is none.
    """

    forward: tuple[Change, ...] = ()
    backward: tuple[Change, ...] = ()
    given: Mapping[str, Given] = field(default_factory=dict[str, Given])
    problem: str = ""

    @property
    def kept_bytes(self) -> int:
        """What the forward pass leaves for backward."""
        return sum(change.size_bytes for change in self.forward if change.kind == "activation")

    @property
    def forward_peak_bytes(self) -> int:
        """The most at once in the forward pass."""
        return max(self.curve()[: len(self.forward)], default=0)

    @property
    def backward_peak_bytes(self) -> int:
        """The most at once in the backward pass, with what the forward pass has left."""
        return max(self.curve()[len(self.forward) :], default=0)

    @property
    def gradients(self) -> dict[str, int]:
        """The gradients that backward makes, by parameter."""
        return {change.name: change.size_bytes for change in self.backward if change.kind == "gradient"}

    def curve(self) -> list[int]:
        """Bytes after each event, and during a kernel; what was given is sent between forward and backward."""
        live, found = 0, list[int]()
        for place, change in enumerate((*self.forward, *self.backward)):
            if place == len(self.forward):
                live -= sum(made.size_bytes for made in self.forward if made.kind == "given")
            during = change.size_bytes if change.kind == "kernel" else 0
            live += change.size_bytes - during
            found.append(live + during)
        return found


def simulate(
    stage: Stage,
    code: StageCode,
    functions: Mapping[str, Callable[..., Any]],
    *,
    device: torch.device | None = None,
    flowing: Collection[str] | None = None,
    lender: UnitCache | None = None,
) -> StageProfile:
    """The memory of one micro-batch in one stage.

    Args:
        stage: The stage.
        code: Its function.
        functions: What its operators call: the captured ones, and ``stage.functions`` bound to stand-in ranks.
        device: Where it will run; None for the CPU.
        flowing: The values it gives whose gradients come back; None for all that need one.
        lender: Brings stand-ins of the units of weights that the stage is lent; None if it is lent none.

    Returns:
        The profile; with ``problem`` if the stage cannot run without values.

    Example:
        >>> profile = simulate(lowered.stage, lowered.code, {})  # doctest: +SKIP
    """
    run = _Run(
        stage, Ledger(HUNGRY), device or torch.device("cpu"), flowing, lender or UnitCache((), _no_unit, ahead=False)
    )
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), _without_collector():
            run.both(code, functions)
        return run.profile()
    except (
        Exception
    ) as error:  # code of the user's and any operator run in there; a memory report must not fail with them
        text = str(error).strip().split("\n")[0]
        return StageProfile(problem=f"not predicted: {type(error).__name__}: {text}")


def _no_unit(unit: int) -> Coming:
    raise AssertionError(f"unit {unit} is wanted, and the stage is lent none")


@contextmanager
def _without_collector() -> Iterator[None]:
    """Memory in a cycle (a custom function that keeps its own result) lives until it is collected: at any time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Root(NamedTuple):
    """Where backward starts: not the value, whose memory may be gone by then."""

    edge: GradientEdge
    type: TensorType
    is_given: bool


class _Run:
    """One forward and one backward pass on fakes, as the executor makes them."""

    def __init__(
        self,
        stage: Stage,
        ledger: Ledger,
        device: torch.device,
        flowing: Collection[str] | None,
        lender: UnitCache,
    ) -> None:
        self.stage, self.ledger, self.device, self.flowing = stage, ledger, device, flowing
        self.fakes = Fakes()
        self.after_forward = self.before_backward = 0
        self.roots: list[_Root] = []
        self.parts: list[Any] = []  # the executor keeps them, too
        self.numbers: dict[str, tuple[int, int, bool]] = {}  # of what is given: storage, bytes, is it copied
        self.lender = lender

    def both(self, code: StageCode, functions: Mapping[str, Callable[..., Any]]) -> None:
        without = dict.fromkeys(_ASSERTIONS, lambda *_, **__: None)
        segments = Segments()
        leases = Leases(lambda: segments.is_again)
        lent = leases.bind(self.stage.leases, self.lender)
        there = dict.fromkeys(self.stage.arrivals, lambda weight: weight)
        function = code.compile({**functions, **without, **lent, **there}, segments, leases if lent else None)
        held = [self._argument(name) for name in code.arguments]
        roles = [output.role for output in self.stage.graph.outputs if isinstance(output.value, Ref)]
        with self.fakes.mode, self.ledger:
            results = list(function(*held, lambda _: None))
            self.after_forward = len(self.ledger.entries)
            for role in roles:
                self._hand_over(role, results.pop(0))
            self.before_backward = len(self.ledger.entries)
            self._backward()
            self.lender.clear()

    def _argument(self, name: str) -> Any:
        leaf = self.stage.graph.leaves[name]
        if isinstance(leaf.type, ScalarType):
            return _NUMBERS.get(leaf.type.kind)
        assert not isinstance(leaf.type, ListType), name
        is_parameter = isinstance(leaf, Parameter)
        needs_grad = (is_parameter and leaf.trainable) or (isinstance(leaf, Taken) and leaf.needs_grad)
        tensor = self._fake(leaf.type, requires_grad=needs_grad)
        if needs_grad:
            kind = "gradient" if is_parameter else "returned"
            tensor.register_post_accumulate_grad_hook(lambda leaf: self._arrived(kind, name, leaf))
        return tensor

    def _fake(self, kind: TensorType, *, requires_grad: bool = False) -> torch.Tensor:
        tensor = self.fakes.tensor(kind, self.device, requires_grad=requires_grad)
        self.ledger.outside(tensor)
        return tensor

    def _arrived(self, kind: str, name: str, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self.ledger.mark(f"{kind} {name}", leaf.grad)

    def _hand_over(self, role: str, value: Any) -> None:
        """Send a result, or report it, and let go of it."""
        name, is_given = role.removeprefix(GIVEN), role.startswith(GIVEN)
        if not isinstance(value, torch.Tensor):
            return
        if is_given:
            size_bytes, is_copied = value.untyped_storage().nbytes(), not value.is_contiguous()
            self.numbers[name] = (self.ledger.number_of(value), size_bytes, is_copied)
        else:
            self.parts.append(value.detach())
        is_root = role in _LOSSES or (is_given and (self.flowing is None or name in self.flowing))
        if is_root and value.requires_grad:
            kind = TensorType(value.dtype, tuple(value.shape))
            self.roots.append(_Root(get_gradient_edge(value), kind, is_given))

    def _backward(self) -> None:
        gradients: list[torch.Tensor] = []
        for root in self.roots:
            gradients.append(self._fake(root.type))
            if not root.is_given:
                gradients[-1] = torch.full_like(gradients[-1], 1.0)
        edges = [root.edge for root in self.roots]
        self.roots.clear()
        if edges:
            torch.autograd.backward(edges, gradients)

    def profile(self) -> StageProfile:
        entries, workspaces = self.ledger.entries, find_workspaces(self.ledger.calls)
        sizes = [workspaces[call] for call in self.ledger.calls]
        forward, between = entries[: self.after_forward], entries[self.after_forward : self.before_backward]
        after_forward = _made(forward) - _gone(forward)
        kept = after_forward - _gone(between)
        kinds = {number: "activation" if number in kept else "given" for number in after_forward}
        given: dict[str, Given] = {}
        seen = {0}  # memory of a weight, or of what was taken
        for name, (number, size_bytes, is_copied) in self.numbers.items():
            given[name] = Given(0 if number in seen else size_bytes, number in kept or number == 0, is_copied)
            seen.add(number)
        backward = changes_of(entries[self.before_backward :], kinds, sizes)
        return StageProfile(changes_of(forward, kinds, sizes), backward, given)


def _made(entries: Iterable[Entry]) -> set[int]:
    return {entry.storage for entry in entries if entry.size_bytes > 0}


def _gone(entries: Iterable[Entry]) -> set[int]:
    return {entry.storage for entry in entries if entry.size_bytes < 0}


def changes_of(
    entries: Iterable[Entry], kinds: Mapping[int, str], workspaces: Sequence[int] = ()
) -> tuple[Change, ...]:
    """A ledger's entries by what the memory is for.

    Args:
        entries: The entries, in order.
        kinds: What storages are for; others are temporary.
        workspaces: What each call takes while it runs.
    """
    found: list[Change] = []
    owned: set[int] = set()  # storages that have become gradients
    for entry in entries:
        kind = kinds.get(entry.storage, "temporary")
        if entry.kind == "call":
            found.append(Change("kernel", workspaces[entry.storage]))
        elif entry.kind == "mark":
            becomes, _, name = entry.name.partition(" ")
            is_new = entry.storage > 0 and entry.storage not in owned
            if is_new:
                owned.add(entry.storage)
                found.append(Change(kind, -entry.size_bytes))
            found.append(Change(becomes, entry.size_bytes if is_new else 0, name))
        elif entry.storage not in owned:
            found.append(Change(kind, entry.size_bytes))
    return tuple(found)
