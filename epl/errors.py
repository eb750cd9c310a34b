"""The errors that EPL raises for its users.

    EplError
    |-- ConfigError     a key, a type or a combination of settings (also a ValueError)
    |-- ClusterError    devices that do not add up, a launcher's environment that is incomplete (also a ValueError)
    |-- StrategyError   scopes and TaskGraphs that cannot be run as written (also a ValueError)
    |-- CaptureError    a model that cannot be captured as a graph (also a RuntimeError)
    |-- GraphError      a graph that breaks an invariant, or text that is not a graph (also a ValueError)
    |-- PlanError       a plan that cannot be carried out (also a ValueError)
    `-- RunError        something that went wrong while ranks were running (also a RuntimeError)
        `-- VerifyError the parallel run does not compute what one process computes

Each message says what was given, what is allowed and what to do. ``assert`` is kept for EPL's own mistakes.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ClusterError",
    "ConfigError",
    "EplError",
    "GraphError",
    "PlanError",
    "RunError",
    "StrategyError",
    "VerifyError",
    "bulleted",
]


class EplError(Exception):
    """Base of every error that EPL raises on purpose."""


class ConfigError(EplError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or at odds with another one."""


class ClusterError(EplError, ValueError):
    """Devices that cannot be laid out as asked, or an environment that does not describe a cluster."""


class StrategyError(EplError, ValueError):
    """Annotations that contradict one another or cannot be run."""


class CaptureError(EplError, RuntimeError):
    """A model that cannot be captured as a graph without changing what it computes."""


class GraphError(EplError, ValueError):
    """A graph that breaks an invariant of the intermediate representation."""


class PlanError(EplError, ValueError):
    """A plan that is inconsistent or does not fit the graph or the cluster."""


class RunError(EplError, RuntimeError):
    """A failure at run time: ranks that disagree, a rank that failed, a wait that ran out."""


class VerifyError(RunError):
    """The parallel run and the plain process computed different numbers."""


def bulleted(head: str, lines: list[str]) -> str:
    """One message out of many findings, so that all of them can be mended at once."""
    return "\n".join([head, *(f"  - {line}" for line in lines)])
