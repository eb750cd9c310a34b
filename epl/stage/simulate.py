"""How much memory a stage takes in forward and backward: its own function, run once on fake tensors with a ledger.

    stage, code -> fakes of all it takes -> forward, backward -> Profile

Nothing is modelled: the function that will run is run, with autograd, recomputing and all, and every storage is seen as it
is made and given back. What fakes lack (values, the insides of kernels) comes from stand-ins and trials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from epl.capture.fakes import Fakes
from epl.capture.ledger import Entry, Ledger
from epl.ir.graph import Parameter, Taken
from epl.ir.types import ListType, ScalarType, TensorType
from epl.stage.codegen import StageCode
from epl.stage.stage import GIVEN, Stage
from epl.stage.workspaces import HUNGRY, find_workspaces

__all__ = ["Change", "StageProfile", "changes_of", "simulate"]

_NUMBERS: dict[str, Any] = {"bool": True, "int": 1, "float": 0.5}
_ASSERTIONS = ("aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_tensor_metadata.default")
_LOSSES = ("loss", "total")


class Change(NamedTuple):
    """One event in the memory of a stage.

    Args:
        kind: ``activation`` (what outlives the forward pass), ``temporary``, ``kernel`` (made and given back at once),
            ``gradient`` (of a parameter, which a temporary becomes) or ``returned`` (the same of a value taken).
        size_bytes: Made, or given back if negative.
        name: Of the parameter or the value.
    """

    kind: str
    size_bytes: int
    name: str = ""


@dataclass(frozen=True)
class StageProfile:
    """The memory of one stage for one micro-batch, beyond what is there before: weights, the batch, what it takes.

    Args:
        forward: The events of the forward pass.
        backward: The events of the first backward pass, which leaves new gradients.
        given: What each value for other stages takes, without what another one has counted.
        copied: Those of them that are copied when they are sent, since they are not contiguous.
        problem: Why there is no profile, if there is none.
    """

    forward: tuple[Change, ...] = ()
    backward: tuple[Change, ...] = ()
    given: Mapping[str, int] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    problem: str = ""

    @property
    def kept_bytes(self) -> int:
        """What the forward pass leaves for backward, and what it gives."""
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
        """Bytes after each event, and during a kernel."""
        live, found = 0, list[int]()
        for change in (*self.forward, *self.backward):
            during = change.size_bytes if change.kind == "kernel" else 0
            live += change.size_bytes - during
            found.append(live + during)
        return found


def simulate(
    stage: Stage,
    code: StageCode,
    arguments: Sequence[str],
    functions: Mapping[str, Callable[..., Any]],
    *,
    device: torch.device | None = None,
    flowing: Collection[str] | None = None,
) -> StageProfile:
    """The memory of one micro-batch in one stage.

    Args:
        stage: The stage.
        code: Its function.
        arguments: The values that the function takes, in order.
        functions: What its operators call: the captured ones, and ``stage.functions`` bound to stand-in ranks.
        device: Where it will run; None for the CPU.
        flowing: The values it gives whose gradients come back; None for all that need one.

    Returns:
        The profile; with ``problem`` if the stage cannot run without values.

    Example:
        >>> profile = simulate(lowered.stage, lowered.code, arguments, {})  # doctest: +SKIP
    """
    run = _Run(stage, Ledger(HUNGRY), device or torch.device("cpu"), flowing)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            run.both(code, arguments, functions)
    except (
        Exception
    ) as error:  # code of the user's and any operator run in there; a memory report must not fail with them
        text = str(error).strip().split("\n")[0]
        return StageProfile(problem=f"not predicted: {type(error).__name__}: {text}")
    return run.profile()


class _Run:
    """One forward and one backward pass on fakes."""

    def __init__(self, stage: Stage, ledger: Ledger, device: torch.device, flowing: Collection[str] | None) -> None:
        self.stage, self.ledger, self.device, self.flowing = stage, ledger, device, flowing
        self.fakes = Fakes()
        self.after_forward = 0
        self.given: dict[str, int] = {}
        self.copied: set[str] = set()

    def both(self, code: StageCode, arguments: Sequence[str], functions: Mapping[str, Callable[..., Any]]) -> None:
        without = dict.fromkeys(_ASSERTIONS, lambda *_, **__: None)
        function = code.compile({**functions, **without})
        held = [self._argument(name) for name in arguments]
        with self.fakes.mode, self.ledger:
            results = function(*held, lambda _: None)
            self.after_forward = len(self.ledger.entries)
            self._note_given(results)
            self._backward(results)

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

    def _note_given(self, results: Sequence[Any]) -> None:
        seen: set[int] = set()
        for role, value in zip((output.role for output in self.stage.graph.outputs), results, strict=False):
            if not role.startswith(GIVEN) or not isinstance(value, torch.Tensor):
                continue
            number = self.ledger.number_of(value)
            is_new = number > 0 and number not in seen
            self.given[role.removeprefix(GIVEN)] = value.untyped_storage().nbytes() if is_new else 0
            seen.add(number)
            if not value.is_contiguous():
                self.copied.add(role.removeprefix(GIVEN))

    def _backward(self, results: Sequence[Any]) -> None:
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        parts: list[Any] = []
        roles = [output.role for output in self.stage.graph.outputs if hasattr(output.value, "name")]
        for role, value in zip(roles, results, strict=True):
            name = role.removeprefix(GIVEN)
            is_given = role.startswith(GIVEN)
            is_root = role in _LOSSES or (is_given and (self.flowing is None or name in self.flowing))
            if not is_given:
                parts.append(value.detach() if isinstance(value, torch.Tensor) else value)
            if is_root and isinstance(value, torch.Tensor) and value.requires_grad:
                roots.append(value)
                kind = TensorType(value.dtype, tuple(value.shape))
                gradients.append(self._fake(kind) if is_given else torch.full_like(value, 1.0))
        if roots:
            torch.autograd.backward(roots, gradients)

    def profile(self) -> StageProfile:
        entries, workspaces = self.ledger.entries, find_workspaces(self.ledger.calls)
        sizes = [workspaces[call] for call in self.ledger.calls]
        made = {entry.storage for entry in entries[: self.after_forward] if entry.size_bytes > 0}
        gone = {entry.storage for entry in entries[: self.after_forward] if entry.size_bytes < 0}
        kept = made - gone
        return StageProfile(
            changes_of(entries[: self.after_forward], kept, sizes),
            changes_of(entries[self.after_forward :], kept, sizes),
            self.given,
            frozenset(self.copied),
        )


def changes_of(entries: Iterable[Entry], kept: set[int], workspaces: Sequence[int]) -> tuple[Change, ...]:
    """A ledger's entries by what the memory is for.

    Args:
        entries: The entries, in order.
        kept: Storages that outlive the forward pass.
        workspaces: What each call takes while it runs.
    """
    found: list[Change] = []
    owned: dict[int, str] = {}  # a storage that has become a gradient, to the first that it is of
    for entry in entries:
        if entry.kind == "call":
            found.append(Change("kernel", workspaces[entry.storage]))
        elif entry.kind == "mark":
            kind, _, name = entry.name.partition(" ")
            is_new = entry.storage > 0 and entry.storage not in owned
            if is_new:
                owned[entry.storage] = name
                found.append(Change("activation" if entry.storage in kept else "temporary", -entry.size_bytes))
            found.append(Change(kind, entry.size_bytes if is_new else 0, name))
        elif entry.storage not in owned:
            found.append(Change("activation" if entry.storage in kept else "temporary", entry.size_bytes))
    return tuple(found)
