"""The checkpoint contract of fnllm: configs, load plans, parameter trees, tokenizers."""

from .architectures import ARCHITECTURES
from .config import ModelConfig, RopeConfig
from .init import init
from .load import LoadReport, load, load_with_report
from .params import LayerParams, Params, ParamTree, check_params, check_tree
from .plan import LoadPlan, make_plan
from .save import save
from .shard import LocalSizes, Shard, local_sizes

__all__ = [
    "ARCHITECTURES",
    "LayerParams",
    "LoadPlan",
    "LoadReport",
    "LocalSizes",
    "ModelConfig",
    "ParamTree",
    "Params",
    "RopeConfig",
    "Shard",
    "check_params",
    "check_tree",
    "init",
    "load",
    "load_with_report",
    "local_sizes",
    "make_plan",
    "save",
]
