"""EPL (Easy Parallel Library): train models that have outgrown one device without rewriting them."""

from epl import nn
from epl.api import data_loader, init, parallelize
from epl.cluster import Cluster
from epl.config import Config
from epl.env import Env
from epl.errors import (
    CaptureError,
    ClusterError,
    ConfigError,
    EplError,
    GraphError,
    PlanError,
    RunError,
    StrategyError,
    VerifyError,
)
from epl.loss import SumLoss
from epl.nn.checkpoint import checkpoint
from epl.planner.plan import Plan
from epl.runtime.engine import Engine
from epl.scopes import replicate, set_default_strategy, split

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "ClusterError",
    "Config",
    "ConfigError",
    "Engine",
    "Env",
    "EplError",
    "GraphError",
    "Plan",
    "PlanError",
    "RunError",
    "StrategyError",
    "SumLoss",
    "VerifyError",
    "checkpoint",
    "data_loader",
    "init",
    "nn",
    "parallelize",
    "replicate",
    "set_default_strategy",
    "split",
]
