"""`jaxspec generate`: complete prompts, one or a file of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from jaxspec.checkpoint import load_model
from jaxspec.commands.drafters import make_drafter
from jaxspec.commands.progress import DecodingProgress
from jaxspec.engine import Engine
from jaxspec.environment import provenance, sha256_of
from jaxspec.errors import PromptError, SettingError
from jaxspec.prompts import PromptLine, chat_template, encode_prompts, read_prompts
from jaxspec.requests import Acceptance, Completion, SamplingParams, make_requests
from jaxspec.types import Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Complete prompts, speculatively if a drafter is named. Outputs come in the order of inputs."""

    target: str
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    draft: str | None = None
    """A draft model, named like the target."""
    drafter: str | None = None
    """`none`, `ngram`, `ngram:MIN-MAX`, `draft_model:MODEL`, or your own `package.module:factory`."""
    prompt: str | None = None
    """One prompt as text."""
    prompts: pathlib.Path | None = None
    """A file: Spec-Bench questions, plain lines, or JSON lines with `prompt`, `prompt_token_ids` or
    `messages`."""
    max_tokens: int = 64
    """Tokens to emit per prompt at most."""
    draft_length: int = 4
    """Tokens drafted per round."""
    window: int | None = None
    """Tokens scored per round; default: draft length + 1. Runs that share it agree bit for bit."""
    batch_size: int = 8
    """Prompts decoded together."""
    capacity: int = 1024
    """Slots per prompt, for the prompt and its completion."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of parameters, compute and cache; default float32 on CPU, else the checkpoint's."""
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
    """JSON lines file to write; grows in order, batch by batch."""
    resume: bool = False
    """Continue an interrupted output file; the result equals an uninterrupted run's."""
    format: Literal["jsonl", "spec-bench"] = "jsonl"
    """Lines of the output file; spec-bench is what Spec-Bench's own scorer reads."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Generates; returns the JSON document."""
        lines = self._read_lines()
        num_done = self._num_done()
        target = load_model(self.target, dtype=self.dtype)
        encoded = encode_prompts(
            lines,
            target,
            max_prompt_tokens=self.max_prompt_tokens,
            is_chat=self.chat,
            template=chat_template(self.chat_template),
            template_kwargs=self._template_kwargs(),
        )
        engine = Engine(
            target,
            make_drafter(self.drafter, self.draft, target=target, dtype=self.dtype),
            draft_length=self.draft_length,
            window=self.window,
            seats=min(self.batch_size, len(lines)) if self.output is None else self.batch_size,
            capacity=self.capacity,
        )
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)
        requests = make_requests(encoded, params, target, longest=engine.longest_prompt)
        writer = None
        if self.output is not None:
            writer = OutputFile(
                path=self.output,
                format=self.format,
                model_name=target.name,
                fingerprint=_fingerprint(engine, self.dtype, self.max_tokens, self.ignore_eos),
            )
            if num_done:
                writer.check_prefix(encoded, num_done)
        started = time.perf_counter()
        completions = []
        with DecodingProgress(console, len(requests) - num_done) as progress:
            batch_started = started
            for batch in _batches(engine, requests[num_done:], progress):
                now = time.perf_counter()
                share_s, batch_started = (now - batch_started) / len(batch), now
                if writer is not None:
                    first = num_done + len(completions)
                    writer.append(lines[first : first + len(batch)], batch, first, share_s)
                completions.extend(batch)
        elapsed_s = time.perf_counter() - started
        if writer is None:
            self._show(console, completions)
        return self._document(engine, completions, num_done, elapsed_s)

    def _read_lines(self) -> list[PromptLine]:
        if (self.prompt is None) == (self.prompts is None):
            raise SettingError(
                "Give either --prompt TEXT or --prompts FILE"
                + (", not both." if self.prompt is not None else ".")
            )
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"--limit {self.limit} was given; it must be at least 1.")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise SettingError(
                f"--max-prompt-tokens {self.max_prompt_tokens} was given; it must be at least 1."
            )
        if self.prompt is not None:
            return [PromptLine(prompt=self.prompt, fields={}, number=1)]
        return read_prompts(self.prompts)[: self.limit]

    def _template_kwargs(self) -> dict[str, Any] | None:
        if self.chat_template_kwargs is None:
            return None
        try:
            kwargs = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError:
            kwargs = None
        if not isinstance(kwargs, dict):
            raise SettingError(
                f"--chat-template-kwargs {self.chat_template_kwargs!r} was given; it must be a JSON "
                "object."
            )
        return kwargs

    def _num_done(self) -> int:
        """Finished lines of the output file; checks, before anything is loaded, that it can grow."""
        if self.resume and self.output is None:
            raise SettingError("--resume was given without --output; name the file to continue.")
        if self.output is None:
            return 0
        if self.output.exists() and not self.resume:
            raise SettingError(
                f"The output {self.output} exists; add --resume to continue it, or name another file."
            )
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            with open(self.output, "a+b") as file:
                file.seek(0)
                text = file.read()
                # A killed run may leave half a line: it is done again.
                whole = text.rfind(b"\n") + 1
                file.truncate(whole)
        except OSError as error:
            raise SettingError(
                f"The output {self.output} cannot be written ({error.strerror}); name another file."
            ) from error
        return text[:whole].count(b"\n")

    def _show(self, console: Console, completions: Sequence[Completion]) -> None:
        for completion in completions:
            console.rule(f"prompt {completion.request_id}", align="left")
            console.print(completion)
            reason = completion.stop_reason if completion.stop_reason is not None else ""
            console.print(
                f"[dim]{len(completion.token_ids)} tokens, "
                f"{completion.acceptance.emitted_per_round:.2f} per round, "
                f"{completion.finish_reason} {reason}[/dim]"
            )

    def _document(
        self, engine: Engine, completions: Sequence[Completion], num_resumed: int, elapsed_s: float
    ) -> dict[str, Any]:
        total = Acceptance.total([completion.acceptance for completion in completions])
        emitted = total.num_emitted_tokens
        return {
            "command": "generate",
            "engine": engine.describe(),
            "dtype": str(self.dtype or "default"),
            "max_tokens": self.max_tokens,
            "inputs": {str(self.prompts): sha256_of(self.prompts)} if self.prompts else {},
            "output": str(self.output) if self.output else None,
            "num_resumed": num_resumed,
            "num_completions": len(completions),
            "acceptance": total.to_json(),
            "elapsed_s": elapsed_s,
            "tokens_per_s": emitted / elapsed_s if elapsed_s else None,
            "completions": [c.to_json() for c in completions] if self.output is None else None,
            **provenance(),
        }


def _batches(
    engine: Engine, requests: Sequence[Any], progress: DecodingProgress
) -> Iterator[list[Completion]]:
    """Completions of `requests`, as the batches they were decoded in."""
    for first in range(0, len(requests), engine.shape.seats):
        batch = requests[first : first + engine.shape.seats]
        yield list(engine.run(batch, on_progress=progress.batch_at(first)))


def _fingerprint(engine: Engine, dtype: str | None, max_tokens: int, ignore_eos: bool) -> str:
    """What an output depends on besides its prompt. The drafter and the draft length are not in it."""
    shape = dataclasses.asdict(engine.shape)
    settings = [engine.target.name, shape, dtype, max_tokens, ignore_eos]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An output file that is always an ordered prefix of the whole.

    Attributes:
      path: the file.
      format: `jsonl` or `spec-bench`.
      model_name: for Spec-Bench's `model_id`.
      fingerprint: of the settings that the outputs depend on; a resumed run must have the same.
    """

    path: pathlib.Path
    format: str
    model_name: str
    fingerprint: str

    def append(
        self, lines: Sequence[PromptLine], batch: Sequence[Completion], first: int, share_s: float
    ) -> None:
        """Adds a batch, and returns when it is on the disk."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                for index, (line, completion) in enumerate(zip(lines, batch, strict=True)):
                    make = spec_bench_line if self.format == "spec-bench" else jsonl_line
                    fields = make(line, completion, model_name=self.model_name, share_s=share_s)
                    check = {
                        "index": first + index,
                        "prompt_sha256": _digest(completion.prompt_token_ids),
                        "settings": self.fingerprint,
                    }
                    file.write(json.dumps({**fields, "jaxspec": check}, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SettingError(
                f"The output {self.path} cannot be written ({error.strerror}); make room and run "
                "again with --resume, the finished lines are kept."
            ) from error

    def check_prefix(self, prompts: Sequence[tuple[int, ...]], num_done: int) -> None:
        """Raises unless the file's lines are these prompts' under these settings."""
        advice = "resume with the same inputs and settings, or name another output."
        if num_done > len(prompts):
            raise SettingError(
                f"The output {self.path} has {num_done} lines for {len(prompts)} prompts; {advice}"
            )
        with open(self.path, encoding="utf-8") as file:
            for index, (text, prompt) in enumerate(zip(file, prompts, strict=False)):
                expected = {
                    "index": index,
                    "prompt_sha256": _digest(prompt),
                    "settings": self.fingerprint,
                }
                try:
                    found = json.loads(text)["jaxspec"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    found = None
                if found != expected:
                    raise SettingError(
                        f"Line {index + 1} of {self.path} was not written by this run's model, "
                        f"settings and prompts; {advice}"
                    )


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


def jsonl_line(
    line: PromptLine, completion: Completion, *, model_name: str, share_s: float
) -> dict[str, Any]:
    """The input's own fields and the completion."""
    return {**line.fields, **completion.to_json()}


def spec_bench_line(
    line: PromptLine, completion: Completion, *, model_name: str, share_s: float
) -> dict[str, Any]:
    """A line of Spec-Bench's model_answer file (first turn).

    `wall_time` is the batch's time divided by its rows, prefill included.
    """
    if "question_id" not in line.fields:
        raise PromptError(
            f"Line {line.number} of the prompt file has no question_id, which the spec-bench format "
            "needs; use Spec-Bench's question file, or --format jsonl."
        )
    return {
        "question_id": line.fields["question_id"],
        "category": line.fields.get("category"),
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
    return lengths + [current] if current else lengths


