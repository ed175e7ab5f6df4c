"""What the decode loop needs of a model, and the package's own model record.

`Model` is a Protocol: anything that is a function of parameters, tokens, a window and our cache
plugs in (an NNX or Linen module, a hand-written decoder). A cache with one scalar cursor for the
whole batch cannot be used: rows of a speculative batch stand at different offsets after the first
round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec import cache as kv
from jaxspec.errors import PromptError, SettingError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.kernels import KERNELS, KernelsName, check_kernels
from jaxspec.types import PyTree, Window


@runtime_checkable
class Model(Protocol):
    """A language model as pure functions.

    A model may also have a method `param_specs(num_shards)`: the `PartitionSpec` of each of its
    `params` over a mesh axis `model` of so many devices (see `LanguageModel`). Without it every
    device of such an axis holds, and runs, all of the model.

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


def param_specs(owner: Any, num_shards: int) -> PyTree:
    """How a mesh axis `model` splits `owner.params`: what its method of that name says, or nowhere.

    Args:
      owner: a model, or a drafter.
      num_shards: devices of the axis.

    Returns:
      a `PartitionSpec` for each parameter.
    """
    if num_shards > 1 and hasattr(owner, "param_specs"):
        return owner.param_specs(num_shards)
    return jax.tree.map(lambda _: PartitionSpec(), owner.params)


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
        stream = self.stream(skip_special_tokens=False)
        pieces = [stream.push([token]) for token in token_ids]
        if pieces:
            pieces[-1] += stream.end()
        return pieces

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """What turns a growing output into text, as far as it is final."""
        return TextStream(self.hf, skip_special_tokens=skip_special_tokens)

    def fingerprint(self) -> dict[str, int]:
        """Token to id, to tell whether two models share a tokenizer."""
        return self.hf.get_vocab()


class TextStream:
    """The text of one output while it grows: what `push` and at last `end` return, joined, is the
    text of all its tokens.

    A character whose bytes are split over tokens is held back until it is complete. So are bytes
    that are no character at all (shown as U+FFFD), until a character follows or the output ends.
    Where a tokenizer decodes a run of byte tokens as one, such bytes can turn characters before
    them into U+FFFD; what has been returned is not taken back then. (`DecodeStream` of `tokenizers`
    raises there, and has no end.)

    Example:
      >>> import jaxspec
      >>> tokenizer = jaxspec.load_model("demo-target").tokenizer
      >>> stream = tokenizer.stream()
      >>> [stream.push([token]) for token in tokenizer.encode("née")]
      ['n', '', 'é', 'e']
      >>> stream.end()
      ''
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._ids: list[int] = []  # what is decoded anew with every push
        self._shown = 0  # characters of their text that have been returned
        self._whole = 0  # tokens after which the text was last final

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that further tokens add, as far as it is final."""
        self._ids += token_ids
        text = self._decode(self._ids)
        # An unfinished character decodes to replacement characters at the end.
        final = text.rstrip("\ufffd")
        new = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if final == text:
            # Decode on from an earlier token: some tokenizers drop a space at the very beginning.
            before = self._decode(self._ids[self._whole :])
            if before and len(self._ids) >= 8:
                del self._ids[: self._whole]
                self._shown = len(before)
            self._whole = len(self._ids)
        return new

    def end(self) -> str:
        """What was held back, after the last token."""
        return self._decode(self._ids)[self._shown :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
        )


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
      kernels: `xla`; `native` for products and attention in C++ on a CPU (`native`); or `pallas`
        for the attention of `attention_pallas`, for GPUs (elsewhere it is interpreted, for tests).
        They sum in other orders, so outputs differ at ties within rounding. On a mesh that splits
        the model `native` leaves all to `xla`, and `pallas` is refused.

    Raises:
      SettingError: unknown kernels, or such as cannot be used here.
    """

    name: str
    config: ModelConfig
    params: PyTree
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: KernelsName = "xla"

    def __post_init__(self):
        check_kernels(self.kernels)
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

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` of `num_shards` devices splits `params`.

        Raises:
          SettingError: it does not divide the heads, the feed-forward or the vocabulary, or the
            kernels cannot be split.
        """
        if num_shards > 1 and self.kernels == "pallas":
            raise SettingError(
                f"The model {self.name} has kernels={self.kernels!r}, which a mesh axis model of "
                f"{num_shards} devices cannot split; load it with kernels='xla'."
            )
        specs = decoder.param_specs(self.config, num_shards)
        return {name: specs[name] for name in self.params}

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
        kernels = KERNELS[self.kernels]
        return decoder.forward(self.config, params, tokens, window, cache, kernels=kernels)

    def logits(self, params, hidden):
        """Logits `[..., V]` fp32."""
        return decoder.head(self.config, params, hidden, kernels=KERNELS[self.kernels])
