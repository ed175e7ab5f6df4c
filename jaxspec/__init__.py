"""Batched speculative decoding for JAX whose output is provably the target model's own."""

from jaxspec.checkpoint import load_model, save_model
from jaxspec.drafters.base import Drafter, StatelessDrafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine import Engine
from jaxspec.errors import JaxspecError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.registry import PRESETS, random_model
from jaxspec.requests import Acceptance, Completion, SamplingParams

__version__ = "0.1.0"
