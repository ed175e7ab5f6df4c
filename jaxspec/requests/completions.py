"""Completions, and the stop strings that end their text."""

from __future__ import annotations

import dataclasses
import functools
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from jaxspec.errors import SettingError
from jaxspec.models.base import Model
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.telemetry.counters import Acceptance
from jaxspec.telemetry.frames import rounds_frame, tokens_frame
from jaxspec.types import Finish, Origin, Trace

if TYPE_CHECKING:
    import pandas

# What JSON has instead of a log-probability of minus infinity, as in vLLM's server.
LEAST_LOGPROB = -9999.0

# Colours of a completion's tokens, by origin: terminal style and CSS.
ORIGIN_STYLES = {
    Origin.PLAIN: ("", ""),
    Origin.ACCEPTED: ("green", "background:#c8f0cf;color:#111"),
    Origin.CORRECTED: ("bold red", "background:#f8c9c4;color:#111"),
    Origin.BONUS: ("bold blue", "background:#c9dcf8;color:#111"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When things happened to a request, by `time.monotonic`, in seconds. The host looks at the
    rows every few rounds, and that is when it sees tokens.

    Attributes:
      arrival_s: the request was made.
      admitted_s: it got a row, or None.
      first_token_s: its first token was seen, or None.
      last_token_s: its last one was, or None.
      end_s: its completion was made.
    """

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float

    @property
    def queue_s(self) -> float:
        """Seconds without a row."""
        return (self.end_s if self.admitted_s is None else self.admitted_s) - self.arrival_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. A notebook shows its tokens coloured by origin.

    Attributes:
      request_id: the id of the request.
      prompt_token_ids: the prompt, with its special prefix.
      token_ids: the output, including the stop token that ended it, if any.
      text: the output without special tokens, decoded as what follows the prompt; None if the model
        has no tokenizer.
      finish_reason: `stop` (a stop token or string), `length` (max_tokens or max_length) or
        `abort`.
      stop_reason: the stop token's id, the stop string, `max_length`, or None; for an `abort` one
        of `cancelled`, `timeout`, `non-finite`, `device failure`, `device timeout` and `tokenizer
        failure`.
      acceptance: counts of drafted and accepted tokens, including those after a stop string.
      index: which of the prompt's `n` completions this is.
      seed: the seed of the request's draws; None for a greedy one.
      sampling_params: those of the request, with this seed and `n` 1.
      logprobs: for each output token, log-probabilities by token id, of the emitted token and of
        the likeliest ones; None unless asked for.
      logprobs_mode: `raw_logprobs` (of the model's own logits) or `processed_logprobs` (of the
        distribution that was sampled from), as in vLLM.
      prompt_logprobs: the same for the tokens of the prompt, under the model's own logits, with
        None for the first; None unless asked for, and if the request ended before they were there.
      num_reused_tokens: prompt tokens whose KV was reused from the session or from a cached prefix;
        None where there was neither.
      num_reread_tokens: prompt tokens that the session had prefilled or emitted before, and that
        were prefilled again: the chat template rendered them differently, or their KV was no longer
        kept.
      origins: `Origin` of each output token.
      pieces: text of each output token, for display; decoded when it is first read.
      times: when it arrived, got a row, emitted and ended.
      trace: its rounds and drafted tokens, including those after a stop string, as NumPy arrays
        with rounds first (`Completions.rounds` and `.tokens` make frames of them); None unless the
        engine records them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    acceptance: Acceptance
    index: int = 0
    seed: int | None = None
    logprobs: tuple[dict[int, float], ...] | None = dataclasses.field(repr=False, default=None)
    logprobs_mode: str | None = None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = dataclasses.field(
        repr=False, default=None
    )
    num_reused_tokens: int | None = None
    num_reread_tokens: int | None = None
    origins: tuple[Origin, ...] = dataclasses.field(repr=False)
    pieces: Sequence[str] = dataclasses.field(repr=False, default=())
    times: RequestTimes | None = dataclasses.field(repr=False, compare=False, default=None)
    trace: Trace | None = dataclasses.field(repr=False, compare=False, default=None)
    sampling_params: SamplingParams | None = dataclasses.field(
        repr=False, compare=False, default=None
    )

    def to_json(self) -> dict:
        """Fields as JSON values, with vLLM's names. A log-probability of minus infinity (where a
        filter removed the token) is written as -9999.0."""
        fields = {
            "request_id": self.request_id,
            "index": self.index,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "acceptance": self.acceptance.to_json(),
        }
        if self.num_reused_tokens is not None:
            fields["num_reused_tokens"] = self.num_reused_tokens
            fields["num_reread_tokens"] = self.num_reread_tokens
        if self.logprobs is not None:
            fields["logprobs_mode"] = self.logprobs_mode
            fields["logprobs"] = list(map(_written, self.logprobs))
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [each and _written(each) for each in self.prompt_logprobs]
        return fields

    def __rich__(self):
        """The output with accepted tokens in green, corrected ones in red and bonus ones in
        blue."""
        from rich.text import Text

        text = Text()
        for piece, origin in zip(self._shown_pieces(), self.origins, strict=True):
            text.append(piece, style=ORIGIN_STYLES[origin][0])
        return text

    def __repr__(self) -> str:
        shown = self.token_ids if self.text is None else self.text
        if len(shown) > 60:
            shown = f"{shown[:60]}..."
        reason = self.finish_reason
        if self.stop_reason is not None:
            reason += f" ({self.stop_reason!r})"
        return f"<Completion {self.request_id}: {self.summary}, {reason}, {shown!r}>"

    @property
    def summary(self) -> str:
        """E.g. `64 tokens in 23 rounds, 2.78 per round`."""
        return _summary(self.acceptance, len(self.token_ids))

    def _repr_html_(self) -> str:
        return f"{self._html_of_text()}<small>{self.summary}; {_html_legend()}</small>"

    def _html_of_text(self) -> str:
        spans = "".join(
            f'<span style="{ORIGIN_STYLES[origin][1]}">{html.escape(piece)}</span>'
            for piece, origin in zip(self._shown_pieces(), self.origins, strict=True)
        )
        return f'<div style="white-space:pre-wrap">{spans}</div>'

    def _shown_pieces(self) -> Sequence[str]:
        return self.pieces or [f"{token} " for token in self.token_ids]


class LazyPieces(Sequence[str]):
    """The text of each token of an output, like a tuple. The tokens are decoded at the first use,
    because that takes long and few need it.

    Args:
      decode: returns the text of each token.
    """

    def __init__(self, decode: Callable[[], Sequence[str]]):
        self._decode = decode

    @functools.cached_property
    def _pieces(self) -> tuple[str, ...]:
        return tuple(self._decode())

    def __getitem__(self, index):
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._pieces == tuple(other)

    def __hash__(self) -> int:
        return hash(self._pieces)

    def __repr__(self) -> str:
        return repr(self._pieces)

    def __reduce__(self):
        return tuple, (self._pieces,)


class Completions(list[Completion]):
    """Completions in the order of their requests: a list that also makes pandas frames. A notebook
    shows all of them, with their tokens coloured by origin.

    Frames need an engine that records (`Engine(trace=...)`) and pandas (the `analysis` extra).

    Args:
      completions: they.
      save: writes them to a directory; `Engine.generate` gives it.
    """

    def __init__(
        self, completions: Iterable[Completion] = (), *, save: Callable[..., None] | None = None
    ):
        super().__init__(completions)
        self._save = save

    def __reduce__(self):
        return Completions, (list(self),)  # a copy does not know the engine

    @overload
    def __getitem__(self, index: SupportsIndex) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Completions: ...
    def __getitem__(self, index):
        """One of them, or some as `Completions`."""
        found = super().__getitem__(index)
        return Completions(found, save=self._save) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    @property
    def acceptance(self) -> Acceptance:
        """The counts of all of them together."""
        return Acceptance.total([one.acceptance for one in self])

    @property
    def summary(self) -> str:
        """E.g. `1 completion, 64 tokens in 23 rounds, 2.78 per round`."""
        total = self.acceptance
        num_tokens = sum(len(one.token_ids) for one in self)
        return f"{counted(len(self), 'completion')}, {_summary(total, num_tokens)}"

    def _repr_html_(self) -> str:
        shown = "".join(
            f"<small>{html.escape(one.request_id)}</small>{one._html_of_text()}" for one in self
        )
        return f"{shown}<small>{self.summary}; {_html_legend()}</small>"

    def save(
        self, directory: str | os.PathLike, *, overwrite: bool = False, **columns: Iterable[Any]
    ) -> None:
        """Writes prompts, outputs, traces (as Parquet), settings, seeds, versions and digests of
        the weights to a directory, which appears whole or not at all; `jaxspec.load_run` reads it.
        The engine that generated them must still be there, with the same weights.

        Args:
          directory: to be made.
          overwrite: replace a run that is there.
          **columns: further columns of the tables, as in `rounds`.

        Raises:
          SettingError: they are not those of `Engine.generate`; the engine is gone or has other
            weights; pandas or pyarrow is missing; a column does not fit.
          CheckpointError: the directory exists, or cannot be written.
        """
        if self._save is None:
            raise SettingError(
                "Completions that Engine.generate did not return were to be saved, and a run names "
                "the engine's settings and weights; save what generate returned, or a slice of it."
            )
        self._save(self, directory, overwrite=overwrite, columns=columns)

    def rounds(self, **columns: Iterable[Any]) -> pandas.DataFrame:
        """A frame with one row per request and round.

        Its columns, whole numbers int32:
          request_id: text.
          index: which of the prompt's `n` completions.
          round: of this request, from 0.
          engine_round: rounds the engine had run before this one; rounds of different requests with
            the same number were computed together.
          prompt_length: tokens of the prompt.
          output_position: index in the output of the first token that the round emitted.
          context_length: committed tokens at the start of the round, prompt included.
          drafted: drafted tokens; 0 where the round decoded plainly.
          draft_depth: depth that the draft reached; equals `drafted` unless it was a tree.
          accepted: drafted tokens that were accepted and kept.
          emitted: new tokens: `accepted`, plus the target's own token unless a stop token or the
            length limit came first. Rounds that emitted nothing are left out.

        Sums over a request equal its `Acceptance`.

        Args:
          **columns: further columns by name, e.g. `category=[...]`: one value per completion, or
            one per prompt.

        Raises:
          SettingError: there is no trace, no pandas, or a column does not fit.
        """
        return rounds_frame(self, columns)

    def tokens(
        self, *, tokenizer: TextTokenizer | None = None, **columns: Iterable[Any]
    ) -> pandas.DataFrame:
        """A frame with one row per drafted token, rejected ones included, and one per token that
        the target added itself. The rows of a round are its draft, then the target's own token.

        p is the distribution that the row is sampled from, after penalties, temperature and
        filters. q is the draft model's distribution at the same settings. A greedy row is traced at
        temperature 1: p is then the softmax of the model's own logits (penalised, if penalties were
        asked for).

        Its columns, whole numbers int32, others fp32 unless stated:
          request_id, index, round: as in `rounds`.
          kind: text, `drafted`; or the target's own token: `corrected` (a draft was rejected),
            `bonus` (all were accepted) or `plain` (nothing was drafted).
          node: in the draft; -1 for the target's own token.
          parent: the node it follows; -1 is the newest committed token.
          depth: 1 for the first drafted token.
          position: position of the token in the sequence, prompt included, from 0.
          output_position: the same without the prompt.
          token_id: the token.
          target_token_id: what the target wanted in its place: with the coupled verifier the token
            that it draws there with the request's seed, else the likeliest under p. After rejected
            drafts in a chain it is what the target would have wanted, had they been kept. -1 where
            the target's logits are not finite.
          logprob_p: natural logarithm of its probability under p; -inf where a filter removed it.
          logprob_q: under q; NaN where the drafter is deterministic, and for the target's own
            token.
          rank: its rank under p, 1 being the likeliest; tokens that a filter removed are counted
            too.
          accepted: bool, drafted, accepted and kept.
          emitted: bool, `accepted` or the target's own: these rows, in order, are the output (and
            what was decoded after its stop string).
          reached: bool, whether the verifier got to judge it: it was drafted, every node above it
            was kept, and the output did not end before it. Conditional acceptance is the mean of
            `accepted` over these rows.
          entropy_p, entropy_q: in nats; only with `trace='distributions'`.
          overlap: sum of min(p, q), the probability that rejection sampling accepts a token drawn
            from q; only with `trace='distributions'`. The distribution of a deterministic drafter
            is a point mass: entropy 0, and the overlap is p of its token. The target's own token
            has no q: both are NaN.
          token, target: the text of `token_id` and of `target_token_id`; only with a `tokenizer`.

        Args:
          tokenizer: the model's, `model.tokenizer`.
          **columns: as in `rounds`.

        Raises:
          SettingError: there is no trace of tokens, no pandas, or a column does not fit.
        """
        return tokens_frame(self, columns, None if tokenizer is None else tokenizer.texts)


def _written(of_token: Mapping[int, float]) -> dict[str, float]:
    """Log-probabilities by token id as JSON has them."""
    return {str(token): max(value, LEAST_LOGPROB) for token, value in of_token.items()}


def counted(number: int, noun: str) -> str:
    """E.g. `1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _summary(acceptance: Acceptance, num_tokens: int) -> str:
    return (
        f"{counted(num_tokens, 'token')} in {counted(acceptance.num_rounds, 'round')}, "
        f"{acceptance.emitted_per_round:.2f} per round"
    )


def _html_legend() -> str:
    return " ".join(
        f'<span style="{ORIGIN_STYLES[origin][1]}">{origin.name.lower()}</span>'
        for origin in (Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopMatch:
    """Where a stop string ended an output.

    Attributes:
      num_tokens: tokens up to and including the one that completes the string.
      text: the text before the string.
      stop: the string.
    """

    num_tokens: int
    text: str
    stop: str


class OutputText:
    """The text of one output while it grows, and the stop string that ends it. Both depend on the
    tokens alone, not on how many are pushed at a time, and take time linear in the tokens.

    Args:
      tokenizer: the model's.
      prompt_token_ids: the output is decoded as what follows these.
      stop: strings that end the output.
      min_tokens: strings that are complete within the first so many tokens do not count.

    Attributes:
      num_tokens: tokens pushed so far.
      num_taken: characters that `take_settled` has returned so far.
      stopped: where the stop string that is completed first ended the output, or None; what is
        pushed after it changes nothing.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        self.num_tokens = 0
        self.num_taken = 0
        self.stopped: StopMatch | None = None
        self._stream = tokenizer.stream(prompt_token_ids)
        self._stop, self._min_tokens = stop, min_tokens
        self._parts: list[str] = []  # the text
        self._end = ""  # its end, in which a stop string may have begun
        self._num_taken_parts = 0
        self._held = ""  # text of these that `take_settled` has not returned

    def push(self, token_ids: Iterable[int]) -> None:
        """Adds tokens to the output."""
        for token in token_ids:
            if self.stopped is not None:
                return
            part = self._stream.push([token])
            self._parts.append(part)
            self.num_tokens += 1
            if part and self._stop:
                self._find_stop(part)

    def take_settled(self) -> str:
        """The text since the last call that further tokens cannot change: without an incomplete
        character, and without an end that may become a stop string."""
        text = self._held + "".join(self._parts[self._num_taken_parts :])
        self._num_taken_parts = len(self._parts)
        begun = [
            n for string in self._stop for n in range(1, len(string)) if text.endswith(string[:n])
        ]
        num_settled = len(text) - max(begun, default=0)
        self._held = text[num_settled:]
        self.num_taken += num_settled
        return text[:num_settled]

    def _find_stop(self, part: str) -> None:
        """Sets `stopped` if a string is completed in the newest part of the text."""
        text, found = self._end + part, []
        for string in self._stop:
            start = text.find(string, max(0, len(self._end) - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start, string))
        if found and self.num_tokens > self._min_tokens:
            _, start, string = min(found)
            before = "".join(self._parts)
            before = before[: len(before) - len(text) + start]
            self.stopped = StopMatch(num_tokens=self.num_tokens, text=before, stop=string)
        self._end = text[max(0, len(text) + 1 - max(map(len, self._stop))) :]


def find_stop(
    tokenizer: TextTokenizer,
    token_ids: Iterable[int],
    stop: Sequence[str],
    *,
    min_tokens: int,
    prompt_token_ids: Sequence[int] = (),
) -> StopMatch | None:
    """The stop string that is completed first in an output, if any; see `OutputText`."""
    output = OutputText(tokenizer, prompt_token_ids, stop=stop, min_tokens=min_tokens)
    output.push(token_ids)
    return output.stopped


def make_completion(
    request: Request,
    model: Model,
    *,
    token_ids: Sequence[int],
    origins: Sequence[int],
    finish: Finish,
    stop_token: int,
    acceptance: Acceptance,
    stopped: StopMatch | None = None,
    logprobs: tuple[dict[int, float], ...] | None = None,
    logprobs_mode: str | None = None,
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None,
    num_reused_tokens: int | None = None,
    num_reread_tokens: int | None = None,
    times: RequestTimes | None = None,
    trace: Trace | None = None,
) -> Completion:
    """The completion of a row that has ended, cut off at its stop string if it was `stopped`.
    After `Finish.TOKENIZER_ERROR` it has no text."""
    if stopped is not None:
        token_ids = token_ids[: stopped.num_tokens]
        origins = origins[: stopped.num_tokens]
        logprobs = logprobs and logprobs[: stopped.num_tokens]
    text: str | None = None
    pieces: Sequence[str] = ()
    if model.tokenizer is not None and finish != Finish.TOKENIZER_ERROR:
        ended_by_token = finish == Finish.STOP_TOKEN and stopped is None
        prompt = request.prompt_token_ids
        text = model.tokenizer.decode_output(
            prompt, token_ids[:-1] if ended_by_token else token_ids
        )
        pieces = LazyPieces(functools.partial(model.tokenizer.pieces, token_ids, prompt))
    if stopped is not None:
        text, finish_reason, stop_reason = stopped.text, "stop", stopped.stop
    else:
        finish_reason, stop_reason = {
            Finish.STOP_TOKEN: ("stop", stop_token),
            Finish.MAX_TOKENS: ("length", None),
            Finish.MAX_LENGTH: ("length", "max_length"),
            Finish.NON_FINITE: ("abort", "non-finite"),
            Finish.CANCELLED: ("abort", "cancelled"),
            Finish.DEVICE_ERROR: ("abort", "device failure"),
            Finish.TOKENIZER_ERROR: ("abort", "tokenizer failure"),
            Finish.TIMEOUT: ("abort", "timeout"),
            Finish.DEVICE_TIMEOUT: ("abort", "device timeout"),
        }[finish]
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(int(token) for token in token_ids),
        text=text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        acceptance=acceptance,
        index=request.index,
        seed=request.params.seed if request.params.temperature else None,
        sampling_params=request.params,
        logprobs=logprobs,
        logprobs_mode=logprobs_mode if logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        num_reused_tokens=num_reused_tokens,
        num_reread_tokens=num_reread_tokens,
        origins=tuple(Origin(int(origin)) for origin in origins),
        pieces=pieces,
        times=times,
        trace=trace,
    )
