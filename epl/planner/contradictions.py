"""Settings that contradict one another, or would do nothing: errors, with what to do."""

from __future__ import annotations

from epl.config import Config
from epl.errors import ConfigError, StrategyError
from epl.ir.graph import Graph
from epl.units import size_bytes_of

__all__ = ["refuse_contradictions"]


def refuse_contradictions(graph: Graph, config: Config, *, is_opaque: bool) -> None:
    """Settings that have no effect together would be ignored in silence.

    Raises:
        ConfigError: two settings contradict each other, or one has no effect without another.
        StrategyError: what is asked for needs the model as a graph, and there is none.
    """
    _refuse_idle(config)
    if is_opaque:
        _refuse_without_graph(config)
    keys = config.gradient_checkpoint
    if keys.check_gradients and keys.type != "auto" and not is_opaque and all(op.segment is None for op in graph.ops):
        raise ConfigError(
            "gradient_checkpoint.check_gradients is set, and nothing is computed again: set gradient_checkpoint.type to "
            "'auto', mark modules with epl.checkpoint(module), or leave it out"
        )
    if keys.type == "collection" and not is_opaque and all(op.segment is None for op in graph.ops):
        raise StrategyError(
            "gradient_checkpoint.type is 'collection', and nothing in the model is marked: mark modules with "
            "epl.checkpoint(module), use torch.utils.checkpoint in forward, or set 'auto'"
        )
    if config.loss.chunked == "off" and config.loss.chunk_rows:
        raise ConfigError(
            f"loss.chunk_rows is {config.loss.chunk_rows} and loss.chunked is 'off': set one of them only"
        )
    if keys.type == "auto":
        _refuse_wrong_limits(graph, config)
        if is_opaque:
            raise StrategyError(
                "gradient_checkpoint.type='auto' needs the model as a graph, and it cannot be captured as one: the warning "
                "above says why. Mend that, or mark what is to be computed again with torch.utils.checkpoint."
            )
        return
    only_auto = {"end_taskgraph": -1, "memory_budget": "", "extra_compute": 0.34}
    given = [f"gradient_checkpoint.{key}" for key, default in only_auto.items() if getattr(keys, key) != default]
    if given:
        raise ConfigError(
            f"{' and '.join(given)}: for gradient_checkpoint.type='auto', where EPL chooses what to compute again; the "
            f"type is {keys.type!r}. Set it to 'auto', or leave the other out"
        )


def _refuse_wrong_limits(graph: Graph, config: Config) -> None:
    """Limits of automatic recompute that say nothing, or two things at once."""
    keys, given = config.gradient_checkpoint, {setting.key for setting in config.items() if setting.origin != "default"}
    if keys.end_taskgraph >= len(graph.tasks):
        raise ConfigError(
            f"gradient_checkpoint.end_taskgraph is {keys.end_taskgraph}, and the last TaskGraph is {len(graph.tasks) - 1}"
        )
    if not keys.memory_budget:
        return
    if size_bytes_of(keys.memory_budget) < 1:
        raise ConfigError(
            f"gradient_checkpoint.memory_budget is {keys.memory_budget!r}, no memory at all; leave it empty for as little "
            "as extra_compute allows"
        )
    if "gradient_checkpoint.extra_compute" in given:
        raise ConfigError(
            "gradient_checkpoint.memory_budget and extra_compute are both set: with a budget as little is computed again "
            "as keeps it, without one as much as extra_compute allows. Leave one of them out."
        )


_NEED_LEVEL = {  # keys that do nothing while the level is empty
    "offload.level": ("offload.path", "offload.size_limit", "offload.parameters"),
    "amp.level": ("amp.dtype", "amp.debug_log", "amp.loss_scale"),
}


def _refuse_idle(config: Config) -> None:
    for level, keys in _NEED_LEVEL.items():
        idle = [key for key in keys if config.get(key) != Config.spec(key).default]
        if idle and not config.get(level):
            raise ConfigError(f"{' and '.join(idle)} is set, and {level} is not: set {level}, or leave the other out")
    for key in ("run.memory_limit", "offload.size_limit"):
        if config.get(key) and size_bytes_of(config.get(key)) < 1:
            raise ConfigError(f"{key} is {config.get(key)!r}, no room at all; leave it empty for no limit")
    on_disk = [key for key in ("offload.path", "offload.size_limit") if config.get(key)]
    if on_disk and config.offload.level != "disk":
        raise ConfigError(
            f"{' and '.join(on_disk)} is about files, and offload.level is {config.offload.level!r}: set it to 'disk', or "
            "leave the other out"
        )
    if (
        config.amp.level
        and config.amp.dtype == "bf16"
        and config.amp.loss_scale != Config.spec("amp.loss_scale").default
    ):
        raise ConfigError(
            "amp.loss_scale is for amp.dtype='fp16'; bf16 has the range of float32 and needs none. Leave it out, or set "
            "amp.dtype to 'fp16'"
        )


def _refuse_without_graph(config: Config) -> None:
    wishes = {
        "zero.level='v2'": (config.zero.level == "v2", "set zero.level to 'v1'"),
        f"offload.level={config.offload.level!r}": (
            config.offload.level in ("v0", "disk"),
            "leave it out ('optimizer' works without a graph, on accelerators)",
        ),
        "amp.level='O1'": (config.amp.level == "O1", "use torch.autocast in forward"),
    }
    for wish, (is_wished, cure) in wishes.items():
        if is_wished:
            raise StrategyError(
                f"{wish} needs the model as a graph, and it cannot be captured as one: the warning above says why. Mend "
                f"that, or {cure}."
            )
