"""Lossless batched speculative decoding in JAX: the tokens that the target model alone would give.

The names below are imported when they are first used, so that `import jaxspec` is cheap and touches
no device.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the one place: pyproject.toml reads it

if TYPE_CHECKING:
    from jaxspec import types
    from jaxspec.analysis.compare import DrafterComparison, compare
    from jaxspec.analysis.plots import plot_acceptance
    from jaxspec.checkpoint.format import save_model
    from jaxspec.checkpoint.resolve import load_model
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
        JaxspecWarning,
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
    from jaxspec.runtime.compilation import enable_compilation_cache
    from jaxspec.schedulers import Continuous, Pool, Scheduler, Static
    from jaxspec.telemetry.counters import Acceptance
    from jaxspec.verifiers import Block, Coupled, Rejection, Typical, Verifier

_EXPORTS = {
    "analysis.compare": "DrafterComparison compare",
    "analysis.plots": "plot_acceptance",
    "checkpoint.format": "save_model",
    "checkpoint.resolve": "load_model",
    "drafters.base": "Drafter StatelessDrafter",
    "drafters.draft_model": "DraftModel",
    "drafters.ngram": "NGram",
    "drafters.oracle": "Oracle",
    "engine.engine": "Engine",
    "engine.progress": "Progress",
    "engine.queue": "StreamOutput",
    "errors": "CheckpointError ConformanceError JaxspecError JaxspecWarning ModelError "
    "PromptError QueueFullError RequestError SettingError",
    "models.base": "LanguageModel Model",
    "models.config": "ModelConfig RopeConfig",
    "models.registry": "PRESETS random_model",
    "requests.completions": "Completion Completions",
    "requests.requests": "Request",
    "requests.sampling_params": "SamplingParams",
    "runtime.compilation": "enable_compilation_cache",
    "schedulers": "Continuous Pool Scheduler Static",
    "telemetry.counters": "Acceptance",
    "verifiers": "Block Coupled Rejection Typical Verifier",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_SUBMODULES = ("serving", "testing", "types")

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
    "JaxspecWarning",
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
    "enable_compilation_cache",
    "load_model",
    "plot_acceptance",
    "random_model",
    "save_model",
    "types",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"jaxspec.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"jaxspec.{name}")
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


def _warn_of_namesake() -> None:
    """The distribution `jaxspec` on PyPI is another project that installs the same package."""
    try:
        version = importlib.metadata.version("jaxspec")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"The distribution 'jaxspec' {version} (X-ray spectral fitting) is installed beside "
        "'jaxspec-decoding' (this package, speculative decoding), and both install a package named "
        "'jaxspec': uninstall the one you do not need, then reinstall the other.",
        stacklevel=3,
    )


_warn_of_namesake()
