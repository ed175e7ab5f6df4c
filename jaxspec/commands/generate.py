"""`jaxspec generate`: complete prompts, one or a file of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import tyro
from rich.console import Console

from jaxspec.cache.layouts import Layout
from jaxspec.checkpoint.resolve import load_model
from jaxspec.commands.documents import make_document
from jaxspec.commands.drafters import choose_drafter
from jaxspec.commands.progress import DecodingProgress, working
from jaxspec.decode.settings import DEFAULT_DRAFT_LENGTH, DraftLength, Exactness, check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion, Completions
from jaxspec.requests.prompts import PromptLine, chat_template, encode_prompts, read_prompts
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of
from jaxspec.runtime.extras import import_extra
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Origin
from jaxspec.verifiers import Block, Coupled, Rejection, Typical

VERIFIERS = {"coupled": Coupled, "rejection": Rejection, "block": Block, "typical": Typical}
SCHEDULERS = {"continuous": Continuous, "static": Static, "pool": Pool}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Complete prompts, speculatively if a drafter is named; outputs in the order of inputs."""

    target: str
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    draft: str | None = None
    """A draft model, named like the target."""
    drafter: str | None = None
    """`none`, `ngram`, `ngram:MIN-MAX`, `draft_model:MODEL`, or your own `package.module:factory`.
    `draft_model@0.4:MODEL` (with --draft MODEL: `draft_model@0.4`) ends each draft after its first
    token less likely than that."""
    prompt: str | None = None
    """One prompt, as text."""
    prompts: pathlib.Path | None = None
    """A file of prompts, one a line: Spec-Bench questions, plain text, or JSON objects with
    `prompt`, `prompt_token_ids` or `messages`."""
    max_tokens: int = 64
    """Tokens to emit per prompt at most."""
    draft_length: DraftLength = DEFAULT_DRAFT_LENGTH
    """Tokens drafted per round; auto chooses as it goes, by acceptance and by what rounds cost on
    this machine, down to none."""
    exactness: Exactness = "bitwise"
    """bitwise: every token is scored in a window of one width, so that outputs do not depend on
    drafts to the bit. ties: in the narrowest that drafts need; equal except at ties in rounding."""
    verify_length: int | None = None
    """Tokens scored per round; default: draft length + 1, with auto 5. Runs that share it agree bit
    for bit."""
    batch_size: int = 8
    """Prompts decoded together; fewer if there are fewer."""
    scheduler: Literal["continuous", "static", "pool"] = "continuous"
    """Which rows take part in a round. continuous fills a free row at once; static decodes batch
    after batch, as EQSPEC does; pool is EXSPEC's."""
    layout: Layout = "ragged"
    """Where KV stands. ragged moves none; aligned pads rows on the left and moves them after every
    round, as EQSPEC does, for comparison."""
    check_invariants: bool = False
    """Check KV, padding and positions after every round: many times slower, for hunting a fault."""
    max_length: int = 1024
    """Slots per prompt, for the prompt and its completion."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of parameters, compute and cache; default float32 on CPU, else the checkpoint's."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. Default 0."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0, the default, keeps all."""
    top_p: float | None = None
    """Keep the likeliest tokens that reach this mass together. Default 1: all."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the likeliest. Default 0: all."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of prompt and output less likely. Default 1: off."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens in the output. Default 0."""
    frequency_penalty: float | None = None
    """Subtracted once per occurrence in the output. Default 0."""
    generation_config: bool = False
    """Take the checkpoint's recommended values for the sampling options that are not given."""
    seed: int = 0
    """Of the draws. Completion j of the i-th prompt (both from 0) uses seed + i * n + j, so that no
    two share noise, and the same command gives the same tokens again."""
    n: int = 1
    """Completions per prompt."""
    min_tokens: int | None = None
    """Tokens before which nothing ends a completion. Default 0."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends a completion and is cut off; repeat the option for several."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens, and of the emitted one, at each position, of
    the model's own logits."""
    verifier: Literal["coupled", "rejection", "block", "typical"] = "coupled"
    """What decides how much of a draft is kept. coupled: the tokens of plain decoding with the same
    seeds; rejection and block: the target's distribution; typical: lossy."""
    limit: int | None = None
    """Use the first so many prompts of the file."""
    max_prompt_tokens: int | None = None
    """Cut longer prompts to their first so many tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text tokens."""
    chat: bool = False
    """Put text prompts through the chat template, as the user's message."""
    chat_template: str | None = None
    """Instead of the tokenizer's own: `vicuna`, or a Jinja file."""
    chat_template_kwargs: str | None = None
    """JSON object of further template variables, e.g. '{"enable_thinking": false}'."""
    output: pathlib.Path | None = None
    """JSON lines file to write instead of showing the completions; grows in order, by batches."""
    resume: bool = False
    """Continue an interrupted output file; the result equals an uninterrupted run's."""
    format: Literal["jsonl", "spec-bench"] = "jsonl"
    """Lines of the output file; spec-bench is what Spec-Bench's own scorer reads."""
    trace: pathlib.Path | None = None
    """Parquet file for one row per round: context length, drafted, accepted and emitted tokens.
    Written when all prompts are done; replaces an older one."""
    trace_level: Literal["rounds", "tokens", "distributions"] = "rounds"
    """tokens: also one row per drafted token, rejected ones included, in FILE.tokens.parquet;
    distributions: these with entropies and overlap of target and draft."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Generates; returns the JSON document."""
        # Whatever can be refused without a model is refused before one is loaded.
        started_s = time.perf_counter()
        lines, inputs = self._read_lines()
        self._check_numbers()
        self._check_sampling()
        make_drafter = choose_drafter(self.drafter, self.draft, dtype=self.dtype)
        if make_drafter is not None:
            if self.draft_length != "auto":
                verify_length = (
                    self.draft_length + 1 if self.verify_length is None else self.verify_length
                )
                check_draft_length(self.draft_length, verify_length)
        elif self.verify_length not in (None, 1):
            raise SettingError(
                f"--verify-length {self.verify_length} was given without a drafter; add "
                "--draft MODEL or --drafter ngram, or leave it out: plain decoding scores one "
                "token at a time."
            )
        elif self.verifier != "coupled":
            raise SettingError(
                f"--verifier {self.verifier} was given without a drafter, so there is nothing to "
                "verify; add --draft MODEL or --drafter ngram, or leave the verifier out."
            )
        template, template_kwargs = self._chat_settings(lines)
        self._check_output(lines)
        self._check_trace()

        with working(f"loading {self.target}"):
            target = load_model(self.target, dtype=self.dtype)
        encoded = encode_prompts(
            lines,
            target,
            max_prompt_tokens=self.max_prompt_tokens,
            is_chat=self.chat,
            template=template,
            template_kwargs=template_kwargs,
        )
        with working("loading the drafter"):
            drafter = make_drafter(target) if make_drafter is not None else None
        engine = Engine(
            target,
            drafter,
            verifier=VERIFIERS[self.verifier](),
            draft_length=self.draft_length,
            exactness=self.exactness,
            verify_length=self.verify_length,
            scheduler=SCHEDULERS[self.scheduler](),
            layout=self.layout,
            check_invariants=self.check_invariants,
            batch_size=min(self.batch_size, len(lines) * self.n),
            max_length=self.max_length,
            max_logprobs=self.logprobs,
            trace=self.trace_level if self.trace is not None else None,
        )
        params = self._params(target)
        num_prompts = len(lines)
        requests = make_requests(
            encoded,
            [_for_prompt(params, index) for index in range(num_prompts)],
            target,
            longest=engine.longest_prompt,
            names=[line.name for line in lines],
        )
        # From here on one line, prompt and request per completion.
        lines = [line for line in lines for _ in range(params.n)]
        num_done, file = 0, None
        if self.output is not None:
            file = OutputFile(
                path=self.output,
                format=self.format,
                model_name=target.name,
                settings=_settings_digest(engine, params, self.format),
            )
            num_done = file.continue_with([request.prompt_token_ids for request in requests])
        load_s = time.perf_counter() - started_s

        completions: list[Completion] = []
        compile_s = decode_s = 0.0
        print(engine.memory.sentence, file=sys.stderr)
        if num_done < len(requests):
            compile_s = warm_up(engine)
        with DecodingProgress(len(requests) - num_done) as progress:
            try:
                for batch, batch_s in _batches(engine, requests[num_done:], progress):
                    if file is not None:
                        first = num_done + len(completions)
                        share_s = batch_s / len(batch)
                        file.append(lines[first : first + len(batch)], batch, first, share_s)
                    completions.extend(batch)
                    decode_s += batch_s
            except KeyboardInterrupt:
                if file is not None:
                    print(
                        f"{num_done + len(completions)} finished lines are in {self.output}; "
                        "--resume continues there",
                        file=sys.stderr,
                    )
                raise
        total = Acceptance.total([completion.acceptance for completion in completions])
        rate = total.num_emitted_tokens / decode_s if completions else None
        trace_files = self._write_trace(lines, completions)
        if file is None:
            show_completions(console, completions)
        console.print(
            summary(
                total,
                len(completions),
                num_done,
                rate=rate,
                output=self.output,
                rounds_by_draft_length=engine.rounds_by_draft_length,
            ),
            markup=False,
            highlight=False,
        )
        return make_document(
            "generate",
            self,
            engine=engine.describe(),
            sampling=dataclasses.asdict(params),
            **{name: engine.describe()[name] for name in ("verifier", "promise", "exactness")},
            inputs=inputs,
            num_prompts=num_prompts,
            num_resumed=num_done,
            num_completions=len(completions),
            acceptance=total.to_json(),
            rounds_by_draft_length=engine.rounds_by_draft_length,
            trace_files=trace_files,
            tokens_per_s=rate,
            load_s=load_s,
            compile_s=compile_s,
            decode_s=decode_s,
            elapsed_s=time.perf_counter() - started_s,
            completions=[c.to_json() for c in completions] if file is None else None,
        )

    def _read_lines(self) -> tuple[list[PromptLine], dict[str, str]]:
        """The prompts, and the SHA-256 of what they were read from."""
        if self.prompt is not None and self.prompts is not None:
            raise SettingError("Both --prompt and --prompts were given; give one of them.")
        if self.prompts is not None:
            return read_prompts(self.prompts)[: self.limit], {
                str(self.prompts): sha256_of(self.prompts)
            }
        if self.prompt is None:
            raise SettingError("No prompt was given; give --prompt TEXT or --prompts FILE.")
        if self.prompt == "":
            raise PromptError("The prompt is empty; give at least one token.")
        digest = hashlib.sha256(self.prompt.encode(errors="surrogateescape")).hexdigest()
        return [PromptLine(prompt=self.prompt)], {"--prompt": digest}

    def _check_numbers(self) -> None:
        for name in ("batch_size", "max_length", "verify_length", "limit", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise SettingError(f"--{option} {value} was given; it must be at least 1.")

    def _sampling_options(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        options = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {name: value for name, value in options.items() if value is not None}

    def _check_sampling(self) -> None:
        """Raises unless the sampling options are in range, as far as that shows without a model."""
        options = self._sampling_options()
        if self.generation_config:
            options["n"] = min(self.n, 1)  # whether it samples at all is not known yet
        SamplingParams(**options)
        if self.n > 1 and self.format == "spec-bench":
            raise SettingError(
                f"--n {self.n} was given with --format spec-bench, which holds one answer per "
                "question; leave --n out, or use --format jsonl."
            )

    def _params(self, target: LanguageModel) -> SamplingParams:
        """Of the first prompt; see `_for_prompt`."""
        options = self._sampling_options()
        if self.generation_config:
            return SamplingParams.from_generation_config(target, **options)
        return SamplingParams(**options)

    def _chat_settings(
        self, lines: Sequence[PromptLine]
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Chat template and its variables."""
        is_used = self.chat or any(line.is_chat for line in lines)
        for option, value in (
            ("--chat-template", self.chat_template),
            ("--chat-template-kwargs", self.chat_template_kwargs),
        ):
            if value is not None and not is_used:
                raise SettingError(
                    f"{option} was given, but no prompt is a chat; add --chat, which makes text "
                    "the user's message."
                )
        if self.chat_template_kwargs is None:
            return chat_template(self.chat_template), None
        try:
            kwargs = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError:
            kwargs = None
        if not isinstance(kwargs, dict):
            raise SettingError(
                f"--chat-template-kwargs {self.chat_template_kwargs!r} was given; it must be a "
                "JSON object."
            )
        return chat_template(self.chat_template), kwargs

    def _check_output(self, lines: Sequence[PromptLine]) -> None:
        """Raises unless the output can be written in the format asked for."""
        if self.output is None:
            for option, is_given in (
                ("--resume", self.resume),
                ("--format spec-bench", self.format != "jsonl"),
            ):
                if is_given:
                    raise SettingError(f"{option} was given without --output; name the file.")
            return
        if self.format == "spec-bench":
            for line in lines:
                if "question_id" not in line.fields or "category" not in line.fields:
                    raise PromptError(
                        f"{line.name} has no question_id or no category, which the spec-bench "
                        "format needs; use Spec-Bench's question file, or --format jsonl."
                    )
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            with open(self.output, "ab") as file:
                num_bytes = file.tell()
        except OSError as error:
            raise _cannot_write(self.output, error, "name another file") from error
        if num_bytes and not self.resume:
            raise SettingError(
                f"The output {self.output} exists; add --resume to continue it, or name another "
                "file."
            )

    def _check_trace(self) -> None:
        """Raises unless a trace can be written, if one is asked for."""
        if self.trace is None:
            if self.trace_level != "rounds":
                raise SettingError(
                    f"--trace-level {self.trace_level} was given without --trace; name the file."
                )
            return
        if self.trace.suffix != ".parquet":
            raise SettingError(
                f"The trace {self.trace} was named; it is a Parquet file, so its name must end in "
                ".parquet."
            )
        if self.resume:
            raise SettingError(
                "--trace was given with --resume, and nothing was recorded of the lines that are "
                "finished; leave one of them out."
            )
        for module in ("pandas", "pyarrow"):
            import_extra(module, "traces")
        try:
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.trace.parent).close()
        except OSError as error:
            raise _cannot_write(self.trace, error, "name another file") from error

    def _write_trace(
        self, lines: Sequence[PromptLine], completions: Sequence[Completion]
    ) -> list[str]:
        """Writes the frames, with the fields that name each prompt's kind; returns the files."""
        if self.trace is None:
            return []
        kinds = {
            name: [line.fields[name] for line in lines]
            for name in ("question_id", "category", "domain")
            if all(name in line.fields for line in lines)
        }
        traced = Completions(completions)
        frames = {self.trace: traced.rounds(**kinds)}
        if self.trace_level != "rounds":
            frames[self.trace.with_suffix(".tokens.parquet")] = traced.tokens(**kinds)
        for path, frame in frames.items():
            write_parquet(frame, path)
        return [str(path) for path in frames]


def write_parquet(frame: Any, path: pathlib.Path) -> None:
    """Writes a frame; the file appears whole, or the older one stays.

    Raises:
      SettingError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            frame.to_parquet(partial, engine="pyarrow", index=False)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error, "make room, or name another file") from error


def _for_prompt(params: SamplingParams, index: int) -> SamplingParams:
    """Sampling parameters of the prompt at `index`: with seeds of its own."""
    if params.seed is None:
        raise ValueError("a run that can be resumed has a seed")
    return dataclasses.replace(params, seed=params.seed + index * params.n)


def warm_up(engine: Engine) -> float:
    """Compiles an engine's programs and runs them once; returns the seconds that took."""
    started_s = time.perf_counter()
    with working("compiling") as status:
        engine.warm_up(lambda program: status.update(f"compiling {program}"))
        engine.generate([[0, 0]], SamplingParams(max_tokens=1))
    return time.perf_counter() - started_s


def show_completions(console: Console, completions: Sequence[Completion]) -> None:
    """Prints completions, their tokens coloured by origin."""
    for completion in completions:
        if len(completions) > 1:
            prompt, *sample = completion.request_id.split("-")
            name = f"prompt {prompt}" + "".join(f", completion {index}" for index in sample)
            console.rule(name, align="left")
        console.print(completion, soft_wrap=True)
        reason = completion.finish_reason
        if completion.stop_reason is not None:
            reason += f" ({completion.stop_reason})"
        console.print(f"finished: {reason}", style="dim", highlight=False)


def summary(
    total: Acceptance,
    num_completions: int,
    num_resumed: int,
    *,
    rate: float | None,
    output: pathlib.Path | None,
    rounds_by_draft_length: Mapping[int, int],
) -> str:
    """What was done, in a sentence."""
    text = f"{num_completions} completions, {total.num_emitted_tokens} tokens"
    if rate is not None:
        text += (
            f" in {total.num_rounds} rounds, {total.emitted_per_round:.2f} per round, {rate:.0f} "
            "tokens/s"
        )
    if rounds_by_draft_length:
        chosen = ", ".join(f"{n}: {count}" for n, count in rounds_by_draft_length.items())
        text += f"; rounds by draft length {chosen}"
    if num_resumed:
        text += f"; {num_resumed} were finished before"
    return text + (f"; written to {output}" if output is not None else "")


def _batches(
    engine: Engine, requests: Sequence[Request], progress: DecodingProgress
) -> Iterator[tuple[list[Completion], float]]:
    """Completions of `requests` in order, as many at a time as there are batch_size, and the
    seconds since those before them."""
    started_s, batch = time.perf_counter(), []
    for completion in engine.run(requests, on_progress=progress.batch_at(0)):
        batch.append(completion)
        if len(batch) == engine.shape.batch_size:
            ended_s = time.perf_counter()
            yield batch, ended_s - started_s
            started_s, batch = ended_s, []
    if batch:
        yield batch, time.perf_counter() - started_s


def _settings_digest(engine: Engine, params: SamplingParams, format: str) -> str:
    """Of what a line depends on besides its prompt.

    Drafter and draft length change no token of a greedy run or under coupled verification; under
    the other verifiers they do. The seed matters only where tokens are drawn.
    """
    is_sampled = params.temperature > 0
    shape = dataclasses.asdict(engine.shape)
    # These follow from the verifier, or from what is recorded.
    for name in ("is_noise_shared", "needs_draft_probs", "needs_greedy_probs"):
        del shape[name]
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(engine.target.params)})
    sampling = dataclasses.asdict(params if is_sampled else dataclasses.replace(params, seed=None))
    settings = [engine.target.name, shape, dtypes, sampling, format]
    if len(engine.verify_lengths) > 1:  # which of them a token was scored in decides ties
        settings.append(engine.verify_lengths)
    if is_sampled and not engine.verifier.is_coupled:
        described = engine.describe()
        settings += [described[name] for name in ("verifier", "drafter", "draft_length")]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _cannot_write(path: pathlib.Path, error: OSError, advice: str) -> SettingError:
    return SettingError(f"The output {path} cannot be written ({error.strerror}); {advice}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An output file that is always an ordered prefix of the whole.

    Every line begins with a note of its place, its prompt and the settings, by which a run knows
    the lines of an earlier one, the last of them perhaps cut off by a kill.

    Attributes:
      path: the file.
      format: `jsonl` or `spec-bench`.
      model_name: for Spec-Bench's `model_id`.
      settings: digest of the settings that the outputs depend on.
    """

    path: pathlib.Path
    format: str
    model_name: str
    settings: str

    def continue_with(self, prompts: Sequence[tuple[int, ...]]) -> int:
        """Number of finished lines, one per prompt (a prompt with several completions comes as
        often); removes a line that was cut off.

        Raises:
          SettingError: the lines are not of these prompts under these settings; the file is left as
            it is.
        """
        advice = "resume with the same inputs and settings, or name another output."
        content = self.path.read_bytes()
        *lines, rest = content.split(b"\n")
        if len(lines) + bool(rest) > len(prompts):
            raise SettingError(
                f"The output {self.path} has {len(lines) + bool(rest)} lines, and this run makes "
                f"{len(prompts)}; {advice}"
            )
        for index, line in enumerate([*lines, rest] if rest else lines):
            note = {"jaxspec": self._note(index, prompts[index])}
            start = json.dumps(note)[:-1].encode()
            if index < len(lines):
                is_ours = line.startswith(start) and _is_json(line)
            else:
                is_ours = line.startswith(start) or start.startswith(line)
            if not is_ours:
                raise SettingError(
                    f"Line {index + 1} of {self.path} was not written by this run's model, "
                    f"settings and prompts; {advice}"
                )
        if rest:
            with open(self.path, "r+b") as file:
                file.truncate(len(content) - len(rest))
        return len(lines)

    def append(
        self, lines: Sequence[PromptLine], batch: Sequence[Completion], first: int, share_s: float
    ) -> None:
        """Adds a batch, and returns when it is on the disk.

        Args:
          lines: the batch's prompts.
          batch: their completions.
          first: number of lines before them.
          share_s: seconds the batch took, divided by its rows.
        """
        make = spec_bench_line if self.format == "spec-bench" else jsonl_line
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                for index, (line, completion) in enumerate(zip(lines, batch, strict=True), first):
                    fields = make(line, completion, model_name=self.model_name, share_s=share_s)
                    note = {"jaxspec": self._note(index, completion.prompt_token_ids)}
                    file.write(json.dumps(note | fields) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            advice = "make room and run again with --resume, the finished lines are kept"
            raise _cannot_write(self.path, error, advice) from error

    def _note(self, index: int, prompt: Sequence[int]) -> dict[str, Any]:
        return {"index": index, "prompt": _digest(prompt), "settings": self.settings}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


def jsonl_line(
    line: PromptLine, completion: Completion, *, model_name: str, share_s: float
) -> dict[str, Any]:
    """The input's own fields and the completion."""
    own = {name: value for name, value in line.fields.items() if name != "jaxspec"}
    return {**own, **completion.to_json()}


def spec_bench_line(
    line: PromptLine, completion: Completion, *, model_name: str, share_s: float
) -> dict[str, Any]:
    """A line of Spec-Bench's model_answer file (first turn).

    `wall_time` is the time since the last batch of lines divided by the lines of this one, prefill
    included.
    """
    return {
        "question_id": line.fields["question_id"],
        "category": line.fields["category"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, str(line.fields["question_id"])).hex,
        "model_id": model_name,
        "choices": [
            {
                "index": 0,
                "turns": [completion.text],
                "decoding_steps": [completion.acceptance.num_rounds],
                "new_tokens": [len(completion.token_ids)],
                "wall_time": [share_s],
                "accept_lengths": round_lengths(completion.origins),
            }
        ],
        "tstamp": time.time(),
    }


def round_lengths(origins: Sequence[Origin]) -> list[int]:
    """Tokens emitted in each round: accepted ones, then the target's own (unless it was cut)."""
    lengths, current = [], 0
    for origin in origins:
        current += 1
        if origin != Origin.ACCEPTED:
            lengths.append(current)
            current = 0
    return [*lengths, current] if current else lengths
