"""Text to token ids and back: a Hugging Face tokenizer with an explicit special prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import CheckpointError, PromptError
from jaxspec.models.chat import template_process


class TextTokenizer:
    """A Hugging Face tokenizer with its special prefix written down.

    Versions of `transformers` disagree on when to prepend BOS (or GLM's `[gMASK]<sop>`). So a
    converted checkpoint stores the prefix as ids, and text is encoded without special tokens. A
    prompt that already starts with the prefix does not get it twice.

    Raises:
      CheckpointError: the tokenizer has BPE dropout.
    """

    def __init__(self, tokenizer: Any, prefix_token_ids: tuple[int, ...]):
        check_repeatable(getattr(tokenizer, "backend_tokenizer", None))
        self.hf = tokenizer
        self.prefix_token_ids = prefix_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, after the prefix.

        Raises:
          PromptError: the text holds half a character (a lone surrogate).
        """
        check_encodable(text)
        ids = list(self.hf.encode(text, add_special_tokens=False))
        prefix = list(self.prefix_token_ids)
        return ids if prefix and ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, token_ids) -> str:
        """Text of `token_ids` without special tokens; spaces are not cleaned up."""
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
        """Token ids of chat messages, up to where the assistant's answer begins.

        The template is rendered in a separate process, with limits on time and memory; see
        `jaxspec.models.chat`.

        Args:
          template: a Jinja chat template instead of the tokenizer's own.
          template_kwargs: further template variables, such as `enable_thinking`, as JSON values.

        Raises:
          PromptError: there is no template, or it refuses the messages, or it takes too much time
            or memory.
        """
        if template is None and not self.hf.chat_template:
            raise PromptError(
                "Chat messages were given, but the model's tokenizer has no chat template; name "
                "one with --chat-template (chat_template=), or give plain prompts."
            )
        variables = dict(template_kwargs or {})
        try:
            chosen = self.hf.get_chat_template(template, tools=variables.get("tools"))
        except ValueError as error:
            raise PromptError(
                f"The tokenizer's chat templates leave none to choose ({error}); "
                "name one with --chat-template (chat_template=)."
            ) from error
        text = template_process().render(
            chosen, messages, {**self.hf.special_tokens_map, **variables}
        )
        return self.encode(text)

    def pieces(self, token_ids) -> list[str]:
        """Text of each token, special tokens included; joined, they give the decoded text. A
        character that is split over tokens appears with the token that completes it."""
        stream = self.stream(skip_special_tokens=False)
        pieces = [stream.push([token]) for token in token_ids]
        if pieces:
            pieces[-1] += stream.end()
        return pieces

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for a growing output."""
        return TextStream(self.hf, skip_special_tokens=skip_special_tokens)

    def fingerprint(self) -> dict[str, int]:
        """The vocabulary, token to id: equal for models that share a tokenizer."""
        return self.hf.get_vocab()


def check_repeatable(pipeline: Any, *, named: str = "The tokenizer") -> None:
    """Raises `CheckpointError` if a pipeline of `tokenizers` draws at random how it splits text:
    the same text would then have other token ids each time."""
    dropout = getattr(getattr(pipeline, "model", None), "dropout", None)
    if dropout:
        raise CheckpointError(
            f"{named} has a BPE dropout of {dropout:.3g}, which leaves out merges at random, "
            "so that a text has other token ids each time; set dropout to null in its "
            "tokenizer.json."
        )


def check_encodable(text: str) -> None:
    """Raises `PromptError` for text with surrogates, each of which stands for half a character, or
    for a byte that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text has {text[error.start]!a} at position {error.start}, which is half a "
            "character or a byte that is not UTF-8; write it as UTF-8."
        ) from error


class TextStream:
    """Decodes one output while it grows. The texts that `push` and finally `end` return, joined,
    are the text of all tokens.

    A character that is split over tokens is returned once it is complete. Bytes that do not form a
    character (shown as U+FFFD) are returned when a character follows or the output ends. If a
    tokenizer decodes a run of byte tokens together, such bytes can turn earlier characters into
    U+FFFD; text that has been returned is not revised then. (`DecodeStream` of `tokenizers` raises
    an error in that case, and has no `end`.)

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
        self._ids: list[int] = []  # decoded again at every push
        self._shown = 0  # characters of their text that have been returned
        self._whole = 0  # tokens after which the text was last final

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, as far as it is final."""
        self._ids += token_ids
        text = self._decode(self._ids)
        # An unfinished character decodes to replacement characters at the end.
        final = text.rstrip("\ufffd")
        new = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if final == text:
            # Keep some earlier tokens: some tokenizers drop a space at the very beginning.
            before = self._decode(self._ids[self._whole :])
            if before and len(self._ids) >= 8:
                del self._ids[: self._whole]
                self._shown = len(before)
            self._whole = len(self._ids)
        return new

    def end(self) -> str:
        """The remaining text, after the last token."""
        return self._decode(self._ids)[self._shown :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
        )
