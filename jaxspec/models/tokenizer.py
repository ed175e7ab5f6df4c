"""Text to token ids and back: a Hugging Face tokenizer with its special prefix written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import PromptError


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
