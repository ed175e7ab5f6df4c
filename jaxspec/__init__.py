"""Lossless batched speculative decoding in JAX: exactly the tokens of the target model alone.

The names below are imported when they are first used, so that `import jaxspec` is cheap and touches
no device.
"""

import glob
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the one place: pyproject.toml reads it

_EXPORTS = {
    "audit.external": "audit_outputs",
    "audit.self_audit": "audit_engine",
    "checkpoint.format": "save_model",
    "drafters.base": "Drafter",
    "drafters.draft_model": "DraftModel",
    "drafters.flexdraft.drafter": "FlexDraft",
    "drafters.heads.drafter": "Heads",
    "drafters.ngram": "NGram",
    "drafters.oracle": "Oracle",
    "engine.engine": "Engine",
    "engine.queue": "StreamOutput",
    "engine.saved_runs": "SavedRun load_run",
    "engine.sessions": "Session",
    "lab.compare": "compare",
    "load.drafters": "load_drafter save_drafter",
    "load.models": "load_model",
    "models.base": "LanguageModel Model",
    "models.config": "ModelConfig RopeConfig",
    "models.registry": "random_model",
    "requests.completions": "Completion Completions",
    "requests.sampling_params": "SamplingParams seeds",
    "runtime.compilation": "enable_compilation_cache",
    "schedulers": "Continuous Pool Static",
    "verifiers": "Block Coupled Rejection Typical",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_SUBMODULES = ("errors", "planning", "serving", "testing", "trees", "types")

if TYPE_CHECKING:
    from jaxspec import errors as errors
    from jaxspec import types as types
    from jaxspec.audit.external import audit_outputs as audit_outputs
    from jaxspec.audit.self_audit import audit_engine as audit_engine
    from jaxspec.checkpoint.format import save_model as save_model
    from jaxspec.drafters.base import Drafter as Drafter
    from jaxspec.drafters.draft_model import DraftModel as DraftModel
    from jaxspec.drafters.flexdraft.drafter import FlexDraft as FlexDraft
    from jaxspec.drafters.heads.drafter import Heads as Heads
    from jaxspec.drafters.ngram import NGram as NGram
    from jaxspec.drafters.oracle import Oracle as Oracle
    from jaxspec.engine.engine import Engine as Engine
    from jaxspec.engine.queue import StreamOutput as StreamOutput
    from jaxspec.engine.saved_runs import SavedRun as SavedRun
    from jaxspec.engine.saved_runs import load_run as load_run
    from jaxspec.engine.sessions import Session as Session
    from jaxspec.lab.compare import compare as compare
    from jaxspec.load.drafters import load_drafter as load_drafter
    from jaxspec.load.drafters import save_drafter as save_drafter
    from jaxspec.load.models import load_model as load_model
    from jaxspec.models.base import LanguageModel as LanguageModel
    from jaxspec.models.base import Model as Model
    from jaxspec.models.config import ModelConfig as ModelConfig
    from jaxspec.models.config import RopeConfig as RopeConfig
    from jaxspec.models.registry import random_model as random_model
    from jaxspec.requests.completions import Completion as Completion
    from jaxspec.requests.completions import Completions as Completions
    from jaxspec.requests.sampling_params import SamplingParams as SamplingParams
    from jaxspec.requests.sampling_params import seeds as seeds
    from jaxspec.runtime.compilation import enable_compilation_cache as enable_compilation_cache
    from jaxspec.schedulers import Continuous as Continuous
    from jaxspec.schedulers import Pool as Pool
    from jaxspec.schedulers import Static as Static
    from jaxspec.verifiers import Block as Block
    from jaxspec.verifiers import Coupled as Coupled
    from jaxspec.verifiers import Rejection as Rejection
    from jaxspec.verifiers import Typical as Typical
else:
    __all__ = [*_MODULE_OF, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"jaxspec.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"jaxspec.{name}")
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})


def _warn_of_namesake() -> None:
    """The distribution `jaxspec` on PyPI is another project that installs the same package."""
    # Not with `importlib.metadata`, which takes longer to import than all else here.
    pattern = "jaxspec-*.dist-info"
    found = [name for place in sys.path for name in glob.glob(pattern, root_dir=place or ".")]
    if not found:
        return
    version = found[0].removeprefix("jaxspec-").removesuffix(".dist-info")
    warnings.warn(
        f"The distribution 'jaxspec' {version} (X-ray spectral fitting) is installed beside "
        "'jaxspec-decoding' (this package, speculative decoding), and both install a package named "
        "'jaxspec': uninstall the one you do not need, then reinstall the other.",
        stacklevel=3,
    )


_warn_of_namesake()
