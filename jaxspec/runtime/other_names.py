"""vLLM's and Hugging Face's names for our settings: they are refused, with the name to use here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jaxspec.errors import SettingError

Refusing = TypeVar("Refusing", bound=Callable[..., Any])

_DRAFT_LENGTH = dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), "draft_length")
_OF_ENGINE = {
    name: f"{ours}, a setting of Engine"
    for name, ours in {**_DRAFT_LENGTH, "prompt_lookup_num_tokens": "draft_length"}.items()
}
_OF_REQUEST = dict.fromkeys(
    ("max_tokens", "max_new_tokens", "temperature", "top_k", "top_p", "do_sample", "seed", "stop"),
    "sampling_params, e.g. sampling_params={'max_tokens': 64, 'temperature': 0.7}",
)

OTHER_NAMES: dict[str, dict[str, str]] = {
    "Engine": _DRAFT_LENGTH
    | {
        "model": "target",
        **dict.fromkeys(
            ("speculative_model", "draft_model", "assistant_model"),
            "drafter, e.g. drafter='demo-draft'",
        ),
        "speculative_config": "drafter={'kind': ..., 'model': ...} and draft_length",
        "prompt_lookup_num_tokens": "draft_length, with drafter='ngram'",
        **dict.fromkeys(
            ("prompt_lookup_min", "prompt_lookup_max"), "drafter={'kind': 'ngram', ...}"
        ),
        **dict.fromkeys(("max_model_len", "max_seq_len", "max_cache_len"), "max_length"),
        **dict.fromkeys(("max_num_seqs", "max_batch_size"), "batch_size"),
        "max_num_batched_tokens": "prefill_chunk",
        **dict.fromkeys(("tensor_parallel_size", "data_parallel_size"), "mesh"),
        **dict.fromkeys(
            ("dtype", "torch_dtype"), "dtype of load_model, e.g. load_model(..., dtype='bfloat16')"
        ),
        "max_new_tokens": "max_tokens of SamplingParams",
        "seed": "seed of SamplingParams",
    },
    "Engine.generate": _OF_REQUEST | {"use_tqdm": "on_progress, a function of Progress"},
    "SamplingParams": {
        **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length"), "max_tokens"),
        "min_new_tokens": "min_tokens",
        "do_sample": "temperature (0 is greedy, above 0 samples)",
        **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
        "stop_strings": "stop",
        "sequence_bias": "logit_bias, for single tokens",
        "eos_token_id": "stop_token_ids",
        **dict.fromkeys(("output_logits", "output_scores", "top_logprobs"), "logprobs"),
    },
    "NGram": _OF_ENGINE
    | {
        **dict.fromkeys(
            ("max_matching_ngram_size", "ngram_prompt_lookup_max"), "prompt_lookup_max"
        ),
        "ngram_prompt_lookup_min": "prompt_lookup_min",
    },
    "DraftModel": _OF_ENGINE | {"assistant_confidence_threshold": "min_confidence"},
    "load_model": {"model": "src", "torch_dtype": "dtype", "tensor_parallel_size": "sharding"},
}
OTHER_NAMES["ServingEngine"] = OTHER_NAMES["Engine"]


def refuse_other_names(function: Refusing) -> Refusing:
    """Makes a class or function raise `SettingError` for a keyword of `OTHER_NAMES`, without
    changing it otherwise."""
    wrapped: Any = function
    if not isinstance(wrapped, type):
        return _refusing(wrapped, wrapped.__qualname__)
    wrapped.__init__ = _refusing(wrapped.__init__, wrapped.__qualname__)
    return function


def _refusing(function: Any, name: str) -> Any:
    others = OTHER_NAMES[name]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for given in filter(others.__contains__, kwargs):
            raise SettingError(
                f"{name} was given {given}, another library's name; use {others[given]}."
            )
        return function(*args, **kwargs)

    return checked
