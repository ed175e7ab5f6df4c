"""Text to token ids and back: a Hugging Face tokenizer with an explicit special prefix."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import CheckpointError, PromptError, SettingError
from jaxspec.models.chat import template_process

REPLACEMENT = "\ufffd"  # what bytes that form no character are decoded to
CONTEXT_TOKENS = 5  # of the prompt, decoded together with the output, as in vLLM
# Parts of a character that tokens may split it into, besides the first: UTF-8 has at most 4 bytes.
LATER_PARTS = 3
# Arguments of `apply_chat_template` that are no variables of a template.
_NOT_VARIABLES = frozenset(
    "conversation chat_template tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs".split()
)


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

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, without special tokens by default; spaces are not cleaned up."""
        return self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def decode_output(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """Text of an output after its prompt, without special tokens by default.

        It is what the output adds to the text of the prompt's last tokens, because some tokenizers
        drop the space of the first token they decode. A character that the prompt leaves
        incomplete belongs to the output.
        """
        left_out = self.special_tokens if skip_special_tokens else ()
        if all(token in left_out for token in token_ids):
            return ""
        context, num_shown = self._context(prompt_token_ids)
        whole = self.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
        return whole[num_shown:]

    def encode_output(self, prompt_token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Token ids of the text of an output after its prompt, which may hold special tokens. It is
        encoded together with the text of the prompt's last tokens where these give their ids
        again."""
        context, num_shown = self._context(prompt_token_ids)
        before = self.decode(context)[:num_shown]
        encode = functools.partial(self.hf.encode, add_special_tokens=False)
        first, whole = list(encode(before)), list(encode(before + text))
        if before and whole[: len(first)] == first:
            return tuple(whole[len(first) :])
        return tuple(encode(text))

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that `decode` leaves out, by id."""
        added = self.hf.added_tokens_decoder
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def special_stops(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids of stop strings that are special tokens, which are not in an output's text.

        Raises:
          SettingError: a string can never end an output, because it holds a special token beside
            other text, or half a character.
        """
        found = []
        for string in stop:
            held = [i for i, content in self.special_tokens.items() if content in string]
            exact = [i for i in held if self.special_tokens[i] == string]
            if held and not exact:
                raise SettingError(
                    f"The stop string {string!r} was given, and {self.special_tokens[held[0]]!r} "
                    "is a special token, which is not in an output's text, so it would never end "
                    f"one; give stop_token_ids=[{held[0]}] instead."
                )
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise SettingError(
                    f"The stop string {string!a} was given, which has half a character, so it "
                    "would never end an output; write it as UTF-8."
                )
            found += exact
        return tuple(found)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of chat messages, up to where the assistant's answer begins. Templates write
        special tokens themselves, so the prefix is not put in front.

        The template is rendered in a separate process, with limits on time and memory; see
        `jaxspec.models.chat`.

        Args:
          template: a Jinja chat template instead of the tokenizer's own.
          template_kwargs: further template variables, such as `enable_thinking`, as JSON values.

        Raises:
          PromptError: there is no template, or it refuses the messages, or it takes too much time
            or memory; or `template_kwargs` replaces what is set here.
        """
        if template is None and not self.hf.chat_template:
            raise PromptError(
                "Chat messages were given, but the model's tokenizer has no chat template; name "
                "one with --chat-template (chat_template=), or give plain prompts."
            )
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise PromptError(
                f"chat_template_kwargs of type {type(template_kwargs).__name__} were given; give a "
                "dict of variables."
            )
        if template is not None and not isinstance(template, str):
            raise PromptError(
                f"A chat_template of type {type(template).__name__} was given; give Jinja text."
            )
        variables = dict(template_kwargs or {})
        for name in variables.keys() & _NOT_VARIABLES:
            raise PromptError(
                f"The chat template variable {name!r} was given, and that is no variable of a "
                "template but an argument of transformers; leave it out."
            )
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
        check_encodable(text)
        return list(self.hf.encode(text, add_special_tokens=False))

    def pieces(
        self,
        token_ids: Iterable[int],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = False,
    ) -> list[str]:
        """Text of each token of an output after its prompt; joined, they give the decoded text. A
        character that is split over tokens appears with the token that completes it."""
        stream = self.stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        pieces = [stream.push([token]) for token in token_ids]
        if pieces:
            pieces[-1] += stream.end()
        return pieces

    def texts(self, token_ids: Iterable[int]) -> list[str]:
        """The text of each token as it stands after other text, special ones included; a token that
        is a part of a character is shown as the replacement character, and -1 as nothing."""
        before = self.hf.encode("a", add_special_tokens=False)
        num_before = len(self.decode(before))
        return [
            self.decode([*before, token], skip_special_tokens=False)[num_before:]
            if token >= 0
            else ""
            for token in token_ids
        ]

    def stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> TextStream:
        """A decoder for a growing output after its prompt; see `decode_output`."""
        context, num_shown = self._context(prompt_token_ids)
        return TextStream(
            self.hf,
            left_out=self.special_tokens if skip_special_tokens else (),
            context=context,
            num_shown=num_shown,
        )

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The last tokens of a prompt without special ones, at least `CONTEXT_TOKENS` if it has as
        many; and how many characters of their text belong to the prompt.

        They begin with a whole character, and the characters counted end with one, so that runs of
        byte tokens are decoded as in the whole text.
        """
        ordinary = (
            token for token in reversed(prompt_token_ids) if token not in self.special_tokens
        )
        tail = list(itertools.islice(ordinary, CONTEXT_TOKENS + LATER_PARTS))[::-1]
        is_all = len(tail) < CONTEXT_TOKENS + LATER_PARTS
        last_start = 0 if is_all else LATER_PARTS
        for end in range(len(tail), max(-1, len(tail) - LATER_PARTS - 1), -1):
            for start in range(last_start, -1, -1):
                text = self.decode(tail[start:end])
                is_begun = text.startswith(REPLACEMENT) and not is_all
                is_open = text.endswith(REPLACEMENT)
                # The character may itself be in the text.
                if is_begun and tail[start:][: len(self._replacement_ids)] == self._replacement_ids:
                    is_begun = False
                if is_open and tail[:end][-len(self._replacement_ids) :] == self._replacement_ids:
                    is_open = False
                if not (is_begun or is_open):
                    return tail[start:], len(text)
        # The prompt holds bytes that form no character.
        return tail[last_start:], len(self.decode(tail[last_start:]))

    @functools.cached_property
    def _replacement_ids(self) -> list[int]:
        """Token ids of the replacement character after other text."""
        encode = functools.partial(self.hf.encode, add_special_tokens=False)
        return list(encode("a" + REPLACEMENT))[len(encode("a")) :]

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
    """Decodes one output while it grows, in time linear in its tokens. The texts that `push` and
    finally `end` return, joined, are the text of all tokens.

    A character that is split over tokens is returned once it is complete. Bytes that do not form a
    character (shown as U+FFFD) are returned when a character follows or the output ends. If a
    tokenizer decodes a run of byte tokens together, such bytes can turn earlier characters into
    U+FFFD; text that has been returned is not revised then. (`DecodeStream` of `tokenizers` raises
    an error in that case, and has no `end`.)

    Args:
      tokenizer: a Hugging Face tokenizer.
      left_out: token ids that are not shown.
      context: tokens before the output.
      num_shown: characters of their text that do not belong to the output.

    Example:
      >>> import jaxspec
      >>> tokenizer = jaxspec.load_model("demo-target").tokenizer
      >>> stream = tokenizer.stream()
      >>> [stream.push([token]) for token in tokenizer.encode("née")]
      ['n', '', 'é', 'e']
      >>> stream.end()
      ''
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        left_out: Container[int] = (),
        context: Sequence[int] = (),
        num_shown: int = 0,
    ):
        self._tokenizer = tokenizer
        self._left_out = left_out
        self._ids = list(context)  # decoded again at every push
        self._shown = num_shown  # characters of their text that have been returned
        self._is_begun = False
        self._whole = 0  # tokens after which the text was last final

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, as far as it is final."""
        new_ids = [token for token in token_ids if token not in self._left_out]
        if not new_ids:
            return ""
        self._is_begun = True
        self._ids += new_ids
        text = self._decode(self._ids)
        # An unfinished character decodes to replacement characters at the end.
        final = text.rstrip(REPLACEMENT)
        new = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if final == text:
            if len(self._ids) >= 8:
                # Keep some earlier tokens: some tokenizers drop a space at the very beginning.
                before = self._decode(self._ids[self._whole :])
                if before:
                    del self._ids[: self._whole]
                    self._shown = len(before)
            self._whole = len(self._ids)
        return new

    def end(self) -> str:
        """The remaining text, after the last token."""
        return self._decode(self._ids)[self._shown :] if self._is_begun else ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
