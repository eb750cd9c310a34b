"""Losses in chunks are what plain PyTorch computes, without logits that are there as a whole.

A mistake shows as a loss or a gradient that is off by a factor or by the rows of a chunk, or as a tensor of the logits'
size among what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epl.capture.fakes import Fakes
from epl.errors import RunError
from epl.ir.text import parse, to_text
from epl.passes.chunked_operator import ChunkedLoss
from epl.sharding.collectives import LonelyRank
from tests.marks import slow
from tests.passes.heads import CLASSES, LOSSES, Net, batch_of_tokens, chunk_of, in_chunks, is_chunked, loss_of
from tests.program.local_run import Lowered, check_lowered, lower, run_stages
from tests.runtime.problems import seeded
from tests.zoo import CASES, annotate


def chunked(net: nn.Module, loss_fn: Callable[..., Any], **options: Any) -> Lowered:
    return in_chunks(lower(net, batch_of_tokens(), loss_fn), **options)


# --------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("name", ["bert", "tied", *slow("gpt2", "t5", "llama", "mixtral", "bart", "vit", "mlp")])
def test_models_of_the_zoo_compute_their_loss_in_chunks(name: str) -> None:
    """In one stage and in three, with dropout; with gradients made in the forward pass, and in the backward pass."""
    case = CASES[name]
    model = case.build(torch.float64, dropout=0.2 if case.has_dropout else 0.0)
    batch = case.batch(3, dtype=torch.float64)
    for num_stages in (1, 3):
        if num_stages > 1:
            annotate(model, case.stages[num_stages])
        lowered = lower(model, batch, case.loss_fn)
        for in_flight in (1, 8):
            ours = in_chunks(lowered, 5, in_flight=in_flight)
            assert is_chunked(ours)
            check_lowered(ours, batch, case.loss_fn, dtype=case.accuracy(torch.float64), num_steps=1)


# each by itself, to see which one it is
@pytest.mark.parametrize("names", [tuple(LOSSES), *slow(*((name,) for name in LOSSES))], ids=lambda names: names[0])
def test_each_kind_of_loss_is_what_plain_pytorch_computes(names: tuple[str, ...]) -> None:
    """Gradients made in the forward pass, and in the backward pass; chunks that do not divide, and a single one."""
    lowered = lower(seeded(Net), batch_of_tokens(), loss_of(*names))
    for rows, in_flight in ((4, 1), (4, 8), (100, 1)):
        ours = in_chunks(lowered, rows, in_flight=in_flight)
        assert is_chunked(ours)
        check_lowered(ours, batch_of_tokens(), loss_of(*names), num_steps=1)


def test_float32_is_exact_to_its_own_rounding() -> None:
    net, loss_fn = seeded(Net, dtype=torch.float32), loss_of("mean", "smoothing and class weights", "capped")
    lowered = lower(net, batch_of_tokens(), loss_fn)
    for in_flight in (1, 8):
        check_lowered(in_chunks(lowered, in_flight=in_flight), batch_of_tokens(), loss_fn, dtype=torch.float32)


def _mean(model: Any, batch: Any) -> Tensor:
    return LOSSES["mean"](model, *batch)


def _autocast(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _mean(model, batch)


def _widened(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


MIXED: dict[str, tuple[torch.dtype, Callable[[Any, Any], Tensor]]] = {
    "bfloat16": (torch.bfloat16, _mean),
    "bfloat16, logits widened": (torch.bfloat16, _widened),
    "bfloat16, capped": (torch.bfloat16, lambda model, batch: LOSSES["capped"](model, *batch)),
    "float16": (torch.float16, _mean),
    "autocast": (torch.float32, _autocast),
}


@pytest.mark.parametrize("name", MIXED)
def test_short_types_give_the_types_of_plain_pytorch_and_no_worse_numbers(name: str) -> None:
    dtype, loss_fn = MIXED[name]
    net, batch = seeded(Net, dtype=dtype), batch_of_tokens()
    lowered = lower(net, batch, loss_fn)
    for in_flight in (1, 8):
        net.zero_grad()
        ran = run_stages(in_chunks(lowered, in_flight=in_flight), batch)
        ours = {path: p.grad for path, p in net.named_parameters() if p.grad is not None}
        net.zero_grad()
        loss = loss_fn(net, batch)
        loss.backward()
        assert ran.parts["loss"].dtype == loss.dtype
        torch.testing.assert_close(ran.parts["loss"], loss.detach(), rtol=2e-2, atol=0)
        for path, gradient in ours.items():
            theirs = net.get_parameter(path).grad
            assert theirs is not None
            assert gradient.dtype == theirs.dtype
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_in_which_nothing_counts_gives_what_plain_pytorch_gives(smoothing: float) -> None:
    """The mean of nothing is not a number; its gradient is 0."""
    tokens, _ = batch_of_tokens()
    batch = (tokens, torch.full_like(tokens, -100))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=smoothing)

    net = seeded(Net)
    plain = loss_fn(net, batch)
    (theirs,) = torch.autograd.grad(plain, net.head.weight)
    lowered = lower(net, batch, loss_fn)
    for in_flight in (1, 8):
        net.zero_grad()
        ran = run_stages(in_chunks(lowered, in_flight=in_flight), batch)
        assert (ran.parts["loss"].isnan(), plain.isnan()) == (True, True)
        assert torch.equal(net.head.weight.grad, theirs)


def _checkpointed(model: Any, batch: Any) -> Tensor:
    return checkpoint(lambda x, t: F.cross_entropy(model(x).flatten(0, 1), t.flatten()), *batch, use_reentrant=False)


def test_a_loss_in_a_recompute_segment_makes_its_gradients_in_backward() -> None:
    """Those of the first run would be thrown away."""
    lowered = chunked(seeded(Net), _checkpointed)
    assert is_chunked(lowered)
    assert not chunk_of(lowered).in_forward
    check_lowered(lowered, batch_of_tokens(), _checkpointed)


def test_stages_are_cut_into_recompute_segments_afterwards() -> None:
    case = CASES["tied"]
    batch = case.batch(3, dtype=torch.float64)
    lowered = in_chunks(lower(case.build(torch.float64), batch), recompute="auto")
    ops = lowered.stages[0].code.ops
    assert any(op.segment is not None for op in ops)
    assert all(op.segment is None for op in ops if op.target.startswith("loss."))
    check_lowered(lowered, batch)


def test_a_changed_graph_has_a_text_form() -> None:
    graph = chunked(seeded(Net), _with_argmax).stages[0].stage.graph
    assert parse(to_text(graph)) == graph


# ------------------------------------------------------------------------------------------------------------- metrics


def _with_argmax(m: Any, batch: Any) -> Any:
    """The metric is asked for before the loss, and before logits are made flat."""
    logits = m(batch[0])
    hits = (logits.argmax(-1) == batch[1]).float().mean()
    return F.cross_entropy(logits.flatten(0, 1) * 2, batch[1].flatten()), {"hits": hits}


def _with_shifted_argmax(m: Any, batch: Any) -> Any:
    logits = m(batch[0])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())
    return loss, {"hits": (logits.argmax(-1) == batch[1]).sum(), "length": logits.shape[1]}


def _with_topk(m: Any, batch: Any) -> Any:
    logits = m(batch[0])
    with torch.no_grad():
        hits = (logits.topk(3, -1).indices == batch[1].unsqueeze(-1)).any(-1).sum()
    return F.cross_entropy(logits.transpose(1, 2), batch[1]), {
        "hits": hits,
        "entropy": logits.detach().softmax(-1).max(),
    }


@pytest.mark.parametrize("loss_fn", [_with_argmax, _with_shifted_argmax, _with_topk])
def test_metrics_of_the_logits_are_those_of_plain_pytorch(loss_fn: Callable[..., Any]) -> None:
    lowered = chunked(seeded(Net), loss_fn)
    assert is_chunked(lowered)
    check_lowered(lowered, batch_of_tokens(), loss_fn, num_steps=1)


def test_the_largest_class_comes_from_the_chunks_and_other_metrics_from_logits_without_autograd() -> None:
    def layers(loss_fn: Callable[..., Any]) -> list[bool]:
        (stage,) = chunked(seeded(Net), loss_fn).stages
        return [op.grad for op in stage.code.ops if op.target == "aten.linear.default"]

    assert layers(_with_argmax) == [True]  # the net's own
    assert layers(_with_shifted_argmax) == layers(_with_topk) == [True, False]


# -------------------------------------------------------------------------------------------------------------- memory


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    """What autograd keeps."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda kept: kept):
        yield found


@pytest.mark.parametrize("in_flight", [1, 8])
def test_nothing_as_large_as_the_logits_is_kept(in_flight: int) -> None:
    """Classes are a dimension of weights and of logits only."""
    net = seeded(Net)
    lowered = lower(net, batch_of_tokens(), loss_of(*LOSSES))
    with saved() as plain:
        loss_of(*LOSSES)(net, batch_of_tokens())
    with saved() as ours:
        run_stages(in_chunks(lowered, in_flight=in_flight), batch_of_tokens())
    weights = {shape for p in (*net.parameters(), *net.buffers()) for shape in (p.shape, p.shape[::-1])}

    def logits(kept: list[Tensor]) -> list[torch.Size]:
        return [tensor.shape for tensor in kept if CLASSES in tensor.shape and tensor.shape not in weights]

    assert len(logits(plain)) >= len(LOSSES)
    assert not logits(ours)


def operator(**options: Any) -> Callable[..., Tensor]:
    given = {"dtype": torch.float64, "maps": (), "result": torch.float64, "reduction": 1, "ignored": -100}
    return ChunkedLoss(**{"rows": 4, "smoothing": 0.0, "num_classes": CLASSES, **given, **options}).bind(LonelyRank())


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(10, 8).double(), torch.randn(CLASSES, 8).double(), torch.randn(CLASSES).double()
    return [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.randint(CLASSES, (10,))]


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("in_forward", [True, False])
def test_what_is_frozen_gets_no_gradient_and_nothing_is_kept_for_it(frozen: tuple[int, ...], in_forward: bool) -> None:
    given = arguments()
    for place in frozen:
        given[place].requires_grad_(False)
    with saved() as kept:
        loss = operator(in_forward=in_forward)(*given, None)
    assert loss.requires_grad == (len(frozen) < 3)
    wanted = [tensor for tensor in given[:3] if tensor.requires_grad]
    if in_forward or not wanted:
        large = [tensor.shape for tensor in kept if tensor.dim()]  # beside them, whether any row counts
        assert sorted(large) == sorted(tensor.shape for tensor in wanted)
    else:  # what the layer takes, and for each row two numbers; for all of them one
        assert sum(tensor.numel() for tensor in kept) == sum(tensor.numel() for tensor in given) + 2 * 10 + 1
    if wanted:
        loss.backward()
    plain = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given[:3]]
    if wanted:
        F.cross_entropy(F.linear(*plain), given[3]).backward()
    for ours, theirs in zip(given, plain, strict=False):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_without_autograd_no_gradient_is_made() -> None:
    with saved() as kept, torch.no_grad():
        loss = operator(in_forward=True)(*arguments(), None)
    assert not kept
    assert not loss.requires_grad


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_second_derivative_is_refused(in_forward: bool) -> None:
    given = arguments()
    with pytest.raises(RunError, match=r"no second derivative; set loss\.chunked to off"):
        torch.autograd.grad(operator(in_forward=in_forward)(*given, None), given[0], create_graph=True)


def test_a_label_beyond_the_classes_is_an_error() -> None:
    given = arguments()
    with pytest.raises((RuntimeError, IndexError)):
        operator()(*given[:3], torch.full((10,), CLASSES), None)


@pytest.mark.parametrize("in_flight", [1, 8])
def test_a_stage_runs_on_fake_tensors(in_flight: int) -> None:
    """No branch asks for a value."""
    names = ("mean", "capped", "smoothing and class weights", "none", "class weights, sum")
    lowered = chunked(seeded(Net), loss_of(*names), in_flight=in_flight)
    (stage,) = lowered.stages
    leaves = stage.stage.graph.leaves
    functions = {target: function.bind(LonelyRank()) for target, function in stage.functions.items()}
    function = stage.code.compile(lowered.captured.functions | functions)
    fakes = Fakes()
    with fakes.mode:
        held = [torch.empty(leaves[n].type.sizes, dtype=leaves[n].type.dtype) for n in stage.program.held]
        held = [value.requires_grad_() for value in held]
        loss, *_ = function(*held, *batch_of_tokens(), lambda draw: None)
        loss.backward()
    assert all(value.grad is not None for value in held if value.shape == (CLASSES, 8))


@pytest.mark.parametrize("in_forward", [True, False])
def test_where_no_label_counts_there_is_no_gradient_even_of_what_is_not_a_number(in_forward: bool) -> None:
    """The mean over no labels is no number, and so is what comes back where the loss is squared."""
    given = arguments()
    given[3] = torch.full((10,), -100)
    loss = operator(in_forward=in_forward)(*given, None)
    (loss + loss**2).backward()
    assert loss.isnan()
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in given[:3])
