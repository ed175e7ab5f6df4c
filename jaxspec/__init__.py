"""Batched speculative decoding for JAX whose output is provably the target model's own."""

import importlib.metadata as _metadata
import os as _os
import warnings as _warnings

# transformers is used for its tokenizers only, and would otherwise advise to install torch.
_os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from jaxspec import types
from jaxspec.analysis.compare import DrafterComparison, compare
from jaxspec.analysis.plots import plot_acceptance
from jaxspec.checkpoint.resolve import load_model, save_model
from jaxspec.drafters.base import Drafter, StatelessDrafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.engine.progress import Progress
from jaxspec.engine.queue import StreamOutput
from jaxspec.errors import (
    CheckpointError,
    ConformanceError,
    JaxspecError,
    ModelError,
    PromptError,
    QueueFullError,
    RequestError,
    SettingError,
)
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.registry import PRESETS, random_model
from jaxspec.requests.completions import Completion, Completions
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Scheduler, Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Block, Coupled, Rejection, Typical, Verifier

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Acceptance",
    "Block",
    "CheckpointError",
    "Completion",
    "Completions",
    "ConformanceError",
    "Continuous",
    "Coupled",
    "DraftModel",
    "Drafter",
    "DrafterComparison",
    "Engine",
    "JaxspecError",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "ModelError",
    "NGram",
    "Oracle",
    "Pool",
    "Progress",
    "PromptError",
    "QueueFullError",
    "Rejection",
    "Request",
    "RequestError",
    "RopeConfig",
    "SamplingParams",
    "Scheduler",
    "SettingError",
    "StatelessDrafter",
    "Static",
    "StreamOutput",
    "Typical",
    "Verifier",
    "compare",
    "load_model",
    "plot_acceptance",
    "random_model",
    "save_model",
    "types",
]


def _warn_of_namesake() -> None:
    """The distribution `jaxspec` on PyPI is another project that installs the same package."""
    try:
        version = _metadata.version("jaxspec")
    except _metadata.PackageNotFoundError:
        return
    _warnings.warn(
        f"The distribution 'jaxspec' {version} (X-ray spectral fitting) is installed beside "
        "'jaxspec-decoding' (this package, speculative decoding), and both install a package named "
        "'jaxspec': uninstall the one you do not need, then reinstall the other.",
        stacklevel=3,
    )


_warn_of_namesake()
