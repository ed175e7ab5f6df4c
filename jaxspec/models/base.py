"""What the decode loop needs of a model, and the package's own model record.

`Model` is a Protocol: anything that is a function of parameters, tokens, a window and our cache
plugs in (an NNX or Linen module, a hand-written decoder). A cache with one scalar cursor for the
whole batch cannot be used: rows of a speculative batch stand at different offsets after the first
round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec import cache as kv
from jaxspec.errors import PromptError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.types import PyTree, Window


@runtime_checkable
class Model(Protocol):
    """A language model as pure functions.

    Attributes:
      name: for reports.
      params: pytree of arrays; handed back to the functions below, never closed over.
      vocab_size: V of the logits.
      eos_token_ids: tokens that end an output unless a request says otherwise.
      tokenizer: a `TextTokenizer`, or None if prompts come as token ids only.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def params(self) -> PyTree:  # noqa: D102
        ...

    @property
    def vocab_size(self) -> int:  # noqa: D102
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:  # noqa: D102
        ...

    @property
    def tokenizer(self) -> TextTokenizer | None:  # noqa: D102
        ...

    def init_cache(self, num_rows: int, capacity: int) -> kv.KVCache:
        """A cache of `num_rows` rows of `capacity` slots."""
        ...

    def forward(
        self, params: PyTree, tokens: jax.Array, window: Window, cache: kv.KVCache
    ) -> tuple[jax.Array, kv.KVCache]:
        """Hidden states `[B, T, E]` of `tokens` `[B, T]`; writes the window's KV before it
        reads."""
        ...

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` fp32 of hidden states `[..., E]`."""
        ...


class TextTokenizer:
    """A Hugging Face tokenizer with its special prefix written down.

    Versions of `transformers` disagree on when BOS (or GLM's `[gMASK]<sop>`) is prepended, so a
    converted checkpoint stores the prefix as ids and text is encoded without special tokens. A
    prompt that already starts with the prefix does not get it twice.
    """

    def __init__(self, tokenizer: Any, prefix_token_ids: tuple[int, ...]):
        self.hf = tokenizer
        self.prefix_token_ids = prefix_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` with the prefix in front, once."""
        ids = list(self.hf.encode(text, add_special_tokens=False))
        prefix = list(self.prefix_token_ids)
        return ids if prefix and ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, token_ids) -> str:
        """Text of `token_ids` without special tokens, spaces left as they are."""
        return self.hf.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of chat messages, ending where the assistant's answer begins.

        Args:
          template: a Jinja chat template instead of the tokenizer's own.
          template_kwargs: further variables of the template, e.g. `enable_thinking`.

        Raises:
          PromptError: there is no template, or it refuses the messages.
        """
        if template is None and not self.hf.chat_template:
            raise PromptError(
                "Chat messages were given, but the model's tokenizer has no chat template; name "
                "one with --chat-template (chat_template=), or give plain prompts."
            )
        try:
            text = self.hf.apply_chat_template(
                list(messages),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **(template_kwargs or {}),
            )
        except Exception as error:  # templates raise what they like, most often TemplateError
            raise PromptError(
                f"The chat template refused the messages ({error}); check their roles and contents."
            ) from error
        return self.encode(text)

    def pieces(self, token_ids) -> list[str]:
        """Text of each token; joined they are the decoded text, special tokens shown.

        A character whose bytes are split over tokens appears with the token that completes it.
        """
        ids = list(token_ids)

        def text_between(start: int, end: int) -> str:
            return self.hf.decode(ids[start:end], clean_up_tokenization_spaces=False)

        pieces, start, shown, last_whole = [], 0, "", 0
        for end in range(1, len(ids) + 1):
            text = text_between(start, end)
            # An unfinished character decodes to replacement characters at the end: wait for it.
            known = text if end == len(ids) else text.rstrip("\ufffd")
            pieces.append(known[len(shown) :])
            shown = known
            if known == text:
                if end - start >= 8:
                    # Decode on from a token back: some tokenizers drop a leading space.
                    start, shown = last_whole, text_between(last_whole, end)
                last_whole = end
        return pieces

    def fingerprint(self) -> dict[str, int]:
        """Token to id, to tell whether two models share a tokenizer."""
        return self.hf.get_vocab()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model of the package's own decoder: `(config, params)`, tokenizer and stop tokens.

    Attributes:
      name: the name it was loaded under.
      config: architecture.
      params: parameters in the compute dtype, which is also the KV cache's.
      eos_token_ids: from the checkpoint's generation config.
      tokenizer: None for random presets.
      generation_config: the checkpoint's generation defaults, as read; nothing applies them
        silently.
    """

    name: str
    config: ModelConfig
    params: PyTree
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        # XLA:CPU multiplies a few rows by a transposed matrix three times slower, so there a tied
        # head is kept a second time, transposed.
        if "head" not in self.params and jax.default_backend() == "cpu":
            params = {**self.params, "head": self.params["embedding"].T}
            object.__setattr__(self, "params", params)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def dtype(self) -> jnp.dtype:
        """Compute and cache dtype."""
        return self.params["embedding"].dtype

    def init_cache(self, num_rows: int, capacity: int) -> kv.KVCache:
        """A cache of `num_rows` rows of `capacity` slots in the model's dtype."""
        return kv.init_cache(
            num_layers=self.config.num_layers,
            num_rows=num_rows,
            capacity=capacity,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
        )

    def forward(self, params, tokens, window, cache):
        """Last layer's hidden states `[B, T, E]` before the final norm, and the cache."""
        return decoder.forward(self.config, params, tokens, window, cache)

    def logits(self, params, hidden):
        """Logits `[..., V]` fp32."""
        return decoder.head(self.config, params, hidden)
