"""`jaxspec generate`: complete a prompt, or a file of prompts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import tyro
import xxhash
from rich.console import Console
from rich.text import Text

from jaxspec.commands.chats import Encode, decode_chats
from jaxspec.commands.options import (
    ChatTemplateOptions,
    DrafterOptions,
    EngineArgs,
    EngineOptions,
    JsonOption,
    PromptOptions,
    SamplingOptions,
    TargetOption,
)
from jaxspec.commands.outputs import OutputFile, only_writer_of, write_parquet
from jaxspec.commands.progress import decoding, warm_up, working
from jaxspec.decode.settings import DraftLength, Exactness, check_draft_length
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine, Progress
from jaxspec.engine.saved_runs import run_fields
from jaxspec.errors import PromptError, SettingError
from jaxspec.kernels.registry import family_of
from jaxspec.load.drafters import MakeDrafter
from jaxspec.models.base import LanguageModel, kv_dtype_of
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.completions import ORIGIN_STYLES, Completion, Completions
from jaxspec.requests.prompts import (
    PromptLine,
    Turns,
    chat_template,
    encode_prompts,
    json_object,
)
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params
from jaxspec.runtime.directories import check_can_write
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.options import check_counts
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import PyTree
from jaxspec.verifiers import VerifierName, make_verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand(
    JsonOption,
    ChatTemplateOptions,
    EngineArgs,
    EngineOptions,
    SamplingOptions,
    PromptOptions,
    DrafterOptions,
    TargetOption,
):
    """Complete prompts, speculatively if a drafter is given; outputs are in the order of the
    prompts."""

    FIRST: ClassVar = (
        "target", "draft", "drafter", "drafter_args", "prompt", "prompts", "chat", "max_tokens",
        "temperature", "batch_size", "draft_length", "output",
    )  # fmt: skip

    prompt: str | None = None
    """One prompt, as text."""
    prompts: pathlib.Path | None = None
    """A file of prompts, one per line: Spec-Bench questions, plain text, or JSON objects with
    `prompt`, `prompt_token_ids` or `messages`."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""
    draft_length: DraftLength | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of the drafter's
    tree, or 4. `auto` chooses while decoding, by acceptance and by the measured cost of rounds,
    from 0 up to --verify-length - 1 (without --verify-length, up to the default)."""
    output: pathlib.Path | None = None
    """Write JSON lines to this file, in the order of the prompts; completions are not printed."""

    n: int = 1
    """Completions per prompt, with consecutive seeds."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text tokens."""
    verify_length: int | None = None
    """Tokens scored per round; default: draft length + 1. Runs that share it agree bit for bit."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends a completion and is cut off; repeat the option for several."""
    generation_config: bool = False
    """Use the checkpoint's recommended values for sampling options that you do not give."""
    exactness: Exactness = "bitwise"
    """bitwise: no bit of the output depends on the drafts. ties: score only as many tokens as were
    drafted, which is faster; outputs are equal except at ties within rounding. With the native CPU
    kernels bitwise is just as fast, and ties just as exact."""
    verifier: VerifierName = "coupled"
    """Which rule decides how much of a draft is kept. coupled: outputs are the tokens of plain
    decoding with the same seeds (coupled:independent: the same, but the drafter samples with its
    own noise); rejection and block: samples of the target's distribution; typical: lossy."""
    turns: Turns = "first"
    """For questions with several turns. first: ask only the first; all: ask them one after another,
    in a session that keeps the KV, and write each answer. Without --chat, turns are joined as lines
    of text."""
    shard: str | None = None
    """I/N decodes only part I of N of the prompts, from 1/N to N/N. The parts' outputs, one after
    another, are the lines of the whole: ids and seeds come from the prompt's number in the file."""
    ray: str | None = None
    """Decode the file on the Ray cluster at this address (HOST:PORT of its head, `auto` on one of
    its nodes, or `local`), with an engine in each actor. The output is a directory of Parquet files
    in the order in which rows end; ids and seeds are those of a run without Ray."""
    num_replicas: int | None = None
    """Actors with --ray; each has a GPU, or a share of a node's CPUs. Default 1."""
    mixed_nodes: bool = False
    """Take nodes with other processors, devices or versions, which may choose another of two tied
    tokens. Each row has the fingerprint of its node."""
    resume: bool = False
    """Continue an interrupted output; the result equals that of an uninterrupted run."""
    format: Literal["jsonl", "spec-bench"] = "jsonl"
    """Format of the output file; spec-bench is what Spec-Bench's own scorer reads."""
    trace: pathlib.Path | None = None
    """Parquet file with one row per round: context length, drafted, accepted and emitted tokens.
    Its metadata (`attrs` in pandas) name settings, seeds, versions and digests of the weights.
    Written when all prompts are done; replaces an older one."""

    def run(self, console: Console) -> dict[str, Any]:
        """Generates; returns the JSON document."""
        # Everything that can be refused without a model is refused before one is loaded.
        started_s = time.perf_counter()
        lines, inputs = self._read_lines()
        check_counts(self, "batch_size", "max_length", "verify_length")
        self._check_sampling()
        self.given_engine()
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        self._check_drafting(is_plain=make_drafter is None)
        self._check_turns()
        self._check_ray()
        self._part_of(len(lines))
        encode = self._encoder(lines)
        self._check_output(lines)
        self._check_trace()
        if self.ray is not None:
            found = self._generate_on_ray(console, lines)
        else:
            with only_writer_of(self.output, resume=self.resume):
                found = self._generate(console, lines, make_drafter, encode)
        found["elapsed_s"] = time.perf_counter() - started_s
        return make_document("generate", self, inputs=inputs, **found)

    def _generate(
        self,
        console: Console,
        lines: list[PromptLine],
        make_drafter: MakeDrafter | None,
        encode: Callable[..., list[tuple[int, ...]]],
    ) -> dict[str, Any]:
        """Loads the models and completes the prompts; returns fields of the JSON document."""
        started_s = time.perf_counter()
        target = self.load(self.target)
        encode = functools.partial(encode, model=target)
        part, num_lines = self._part_of(len(lines)), len(lines)
        lines = lines[part]
        encoded = encode(lines, max_prompt_tokens=self.max_prompt_tokens)
        with working("loading the drafter"):
            drafter = make_drafter(target) if make_drafter is not None else None
        engine = self._engine(target, drafter, num_requests=num_lines * self.n)
        if self.generation_config:
            params = SamplingParams.from_generation_config(target, **self.given_sampling())
        else:
            params = self.sampling_params()
        num_prompts = len(lines)
        requests = make_requests(
            encoded,
            self.with_seeds(params, num_lines)[part],
            target,
            longest=engine.longest_prompt,
            names=[line.name for line in lines],
            first=part.start,
        )
        # From here on there is one line, prompt and request per completion.
        lines = [line for line in lines for _ in range(params.n)]
        num_done, file = 0, None
        if self.output is not None:
            file = OutputFile(
                path=self.output,
                format=self.format,
                model_name=target.name,
                settings=_settings_digest(engine, params, self.format),
                first=part.start * params.n,
            )
            num_done = file.continue_with([request.prompt_token_ids for request in requests])
        load_s = time.perf_counter() - started_s

        print(engine.memory.sentence, file=sys.stderr)
        compile_s = warm_up(engine) if num_done < len(requests) else 0.0
        if self.turns == "all":
            lines, completions, decode_s = self._decode_turns(engine, requests, lines, encode, file)
        else:
            completions, decode_s = self._decode(engine, requests, lines, file, num_done)
        total = Completions(completions).acceptance
        self._write_trace(engine, lines, completions)
        if file is None:
            show_completions(console, completions, target.tokenizer)
        console.print(
            summary(
                completions,
                num_done,
                decode_s=decode_s,
                output=self.output,
                rounds_by_draft_length=engine.rounds_by_draft_length,
            ),
            markup=False,
            highlight=False,
        )
        return dict(
            engine=engine.describe(),
            sampling=dataclasses.asdict(params),
            **{name: engine.describe()[name] for name in ("verifier", "promise", "exactness")},
            num_prompts=num_prompts,
            num_resumed=num_done,
            num_completions=len(completions),
            acceptance=total.to_json(),
            rounds_by_draft_length=engine.rounds_by_draft_length,
            tokens_per_s=total.num_emitted_tokens / decode_s if completions else None,
            load_s=load_s,
            compile_s=compile_s,
            decode_s=decode_s,
            completions=[c.to_json() for c in completions] if file is None else None,
        )

    def _generate_on_ray(self, console: Console, lines: list[PromptLine]) -> dict[str, Any]:
        """Has the prompts completed by actors; returns fields of the JSON document."""
        assert self.ray is not None
        assert self.output is not None
        from jaxspec.commands import ray

        given = {name: value for name, value in self.given_sampling().items() if name != "n"}
        prompts = [line.prompt for line in lines for _ in range(self.n)]
        if self.chat:
            prompts = [
                [{"role": "user", "content": one}] if isinstance(one, str) else one
                for one in prompts
            ]
        started_s, settings = time.perf_counter(), self.settings_of_rows()
        rows, num_resumed = ray.decode(
            [ray.row_of(index, prompt, given, settings) for index, prompt in enumerate(prompts)],
            self.output,
            functools.partial(self.make_engine, num_requests=len(prompts)),
            address=self.ray,
            num_replicas=self.num_replicas or 1,
            batch_size=self.batch_size,
            mixed_nodes=self.mixed_nodes,
            resume=self.resume,
            chat_template=chat_template(self.chat_template),
            chat_template_kwargs=json_object("--chat-template-kwargs", self.chat_template_kwargs),
        )
        total = Acceptance.total([row["acceptance"] for row in rows])
        said = f"{len(rows)} rows, {total.num_emitted_tokens} tokens in {total.num_rounds} rounds, "
        said += f"{total.emitted_per_round:.2f} per round; {num_resumed} finished earlier; written "
        console.print(f"{said}to {self.output}", markup=False, highlight=False)
        return dict(
            sampling=given,
            num_prompts=len(lines),
            num_resumed=num_resumed,
            num_completions=len(rows) - num_resumed,
            acceptance=total.to_json(),
            fingerprints=sorted({row["fingerprint"] for row in rows}),
            decode_s=time.perf_counter() - started_s,
        )

    def settings_of_rows(self) -> dict[str, Any]:
        """What the output of an actor's row may depend on besides its prompt and parameters, as far
        as it is known without a model."""
        names = (
            *("target", "draft", "drafter", "drafter_args", "dtype", "kv_dtype", "engine_args"),
            *("batch_size", "max_length", "draft_length", "verify_length", "exactness", "verifier"),
            "chat_template_kwargs",
        )
        found = {name: getattr(self, name) for name in names}
        return found | {"chat_template": chat_template(self.chat_template)}

    def make_engine(self, *, num_requests: int) -> Engine:
        """The engine of an actor, which loads the models itself."""
        target = self.load(self.target)
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        drafter = None if make_drafter is None else make_drafter(target)
        return self._engine(target, drafter, num_requests=num_requests)

    def _read_lines(self) -> tuple[list[PromptLine], dict[str, str]]:
        """The prompts, and the SHA-256 of what they were read from."""
        if self.prompt is not None and self.prompts is not None:
            raise SettingError("Both --prompt and --prompts were given; give one of them.")
        if self.prompts is not None:
            return self.read_prompts(turns=self.turns)
        if self.prompt is None:
            raise SettingError("No prompt was given; give --prompt TEXT or --prompts FILE.")
        if self.prompt == "":
            raise PromptError("The prompt is empty; give at least one token.")
        check_counts(self, "limit", "max_prompt_tokens")
        digest = hashlib.sha256(self.prompt.encode()).hexdigest()
        return [PromptLine(prompt=self.prompt)], {"--prompt": digest}

    def _part_of(self, num_lines: int) -> slice:
        """Which of the prompts this run decodes."""
        if self.shard is None:
            return slice(0, num_lines)
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard, re.ASCII)
        index, number = map(int, found.groups()) if found else (0, 0)
        if not 1 <= index <= number:
            raise SettingError(
                f"--shard {self.shard} was given; give I/N, part I of N, such as 1/4."
            )
        return slice((index - 1) * num_lines // number, index * num_lines // number)

    def _check_sampling(self) -> None:
        """Raises unless the sampling options are in range, as far as that can be checked without a
        model."""
        options = self.given_sampling()
        if self.generation_config:
            options["n"] = min(self.n, 1)  # whether it samples is not known yet
        as_sampling_params(options)
        if self.n > 1 and self.format == "spec-bench":
            raise SettingError(
                f"--n {self.n} was given with --format spec-bench, which holds one answer per "
                "question; leave --n out, or use --format jsonl."
            )

    def _check_turns(self) -> None:
        """Raises unless the options fit questions with several turns, if these are asked."""
        if self.turns == "first":
            return
        reasons = {
            "--resume": (self.resume, "later prompts depend on the answers before them"),
            "--shard": (self.shard is not None, "lines are numbered as they are answered"),
            "--n": (self.n > 1, "only one answer can be continued"),
            "--max-prompt-tokens": (self.max_prompt_tokens is not None, "it would cut the chat"),
            "--format spec-bench": (self.format == "spec-bench", "its lines hold one answer here"),
            "The layout aligned": (
                self.given_engine().get("layout") == "aligned",
                "sessions need ragged rows",
            ),
        }
        _refuse(reasons, "--turns all")

    def _check_ray(self) -> None:
        """Raises unless the options fit a run on Ray, if there is one."""
        check_counts(self, "num_replicas")
        if self.ray is None:
            if self.num_replicas is not None or self.mixed_nodes:
                option = "--mixed-nodes" if self.num_replicas is None else "--num-replicas"
                raise SettingError(
                    f"{option} was given without --ray; add --ray ADDRESS, or leave it out."
                )
            return
        if self.prompts is None or self.output is None:
            raise SettingError(
                f"--ray {self.ray} was given; it takes --prompts FILE and --output DIRECTORY."
            )
        reasons = {
            "--turns all": (self.turns == "all", "a turn needs the answers before it"),
            "--max-prompt-tokens": (
                self.max_prompt_tokens is not None,
                "prompts are not cut there",
            ),
            "--generation-config": (
                self.generation_config,
                "sampling values must be given as options there",
            ),
            "--shard": (self.shard is not None, "the actors share all rows"),
            "--trace": (self.trace is not None, "rounds stay with the actors"),
            "--format spec-bench": (self.format != "jsonl", "the output is Parquet"),
        }
        _refuse(reasons, "--ray")
        for module in ("ray", "ray.data"):
            import_extra(module, "--ray", extra="ray")

    def _check_drafting(self, *, is_plain: bool) -> None:
        """Raises unless the options fit drafting, or plain decoding."""
        if not is_plain:
            if self.draft_length not in (None, "auto"):
                check_draft_length(self.draft_length, self.verify_length)
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

    def _engine(
        self, target: LanguageModel, drafter: Drafter | None, *, num_requests: int
    ) -> Engine:
        return Engine(
            target,
            drafter,
            verifier=make_verifier(self.verifier),
            draft_length=self.draft_length,
            exactness=self.exactness,
            verify_length=self.verify_length,
            batch_size=min(self.batch_size, num_requests),
            max_length=self.max_length,
            max_logprobs=max(
                (
                    number
                    for name in ("logprobs", "prompt_logprobs")
                    if (number := self.given_sampling().get(name)) is not None
                ),
                default=None,
            ),
            trace=None if self.trace is None else "rounds",
            **self.given_engine(),
        )

    def _decode(
        self,
        engine: Engine,
        requests: Sequence[Request],
        lines: Sequence[PromptLine],
        file: OutputFile | None,
        num_done: int,
    ) -> tuple[list[Completion], float]:
        """Completions of the requests after the first `num_done`, and the seconds they took. They
        are written to the file in batches, as soon as each is finished."""
        rest, completions = requests[num_done:], list[Completion]()
        num_written = 0
        started_s = last_s = time.perf_counter()
        with working("decoding") as status:

            def show(seen: Progress) -> None:
                elapsed_s = time.perf_counter() - started_s
                status.update(decoding(seen, len(rest), elapsed_s))

            for completion in engine.run(rest, on_progress=show):
                completions.append(completion)
                batch = completions[num_written:]
                is_full = len(batch) == engine.shape.batch_size or len(completions) == len(rest)
                if file is not None and is_full:
                    first, now_s = num_done + num_written, time.perf_counter()
                    share_s = (now_s - last_s) / len(batch)
                    file.append(lines[first : first + len(batch)], batch, first, share_s)
                    num_written, last_s = len(completions), now_s
        return completions, time.perf_counter() - started_s

    def _decode_turns(
        self,
        engine: Engine,
        requests: Sequence[Request],
        lines: Sequence[PromptLine],
        encode: Encode,
        file: OutputFile | None,
    ) -> tuple[list[PromptLine], list[Completion], float]:
        """The line and the completion of every turn, and the seconds they took; those of a question
        are written to the file as soon as it, and those before it, have been answered."""
        all_lines: list[PromptLine] = []
        completions: list[Completion] = []
        started_s = last_s = time.perf_counter()
        params = [request.params for request in requests]
        with working("decoding") as status:
            for chat in decode_chats(engine, lines, params, encode, is_chat=self.chat):
                now_s = time.perf_counter()
                if file is not None:
                    share_s = (now_s - last_s) / len(chat.completions)
                    file.append(chat.turns, chat.completions, len(completions), share_s)
                last_s = now_s
                all_lines += chat.turns
                completions += chat.completions
                if chat.refusal is not None:
                    print(f"{chat.line.name}: {chat.refusal}", file=sys.stderr)
                status.update(f"decoding: {len(completions)} turns done")
        return all_lines, completions, time.perf_counter() - started_s

    def _encoder(self, lines: Sequence[PromptLine]) -> Callable[..., list[tuple[int, ...]]]:
        """`encode_prompts` with the chat template and its variables."""
        given, text = self.chat_template, self.chat_template_kwargs
        is_used = self.chat or any(line.is_chat for line in lines)
        if not is_used and (given is not None or text is not None):
            option = "--chat-template" if given is not None else "--chat-template-kwargs"
            raise SettingError(
                f"{option} was given, but no prompt is a chat; add --chat, which makes text the "
                "user's message."
            )
        return functools.partial(
            encode_prompts,
            is_chat=self.chat,
            template=chat_template(given),
            template_kwargs=json_object("--chat-template-kwargs", text),
        )

    def _check_output(self, lines: Sequence[PromptLine]) -> None:
        """Raises unless the prompts can be written in the requested format."""
        if self.output is None:
            if self.resume or self.format != "jsonl":
                option = "--resume" if self.resume else f"--format {self.format}"
                raise SettingError(f"{option} was given without --output; name the file.")
            return
        if self.format == "spec-bench":
            for line in lines:
                if "question_id" not in line.fields or "category" not in line.fields:
                    raise PromptError(
                        f"{line.name} has no question_id or no category, which the spec-bench "
                        "format needs; use Spec-Bench's question file, or --format jsonl."
                    )

    def _check_trace(self) -> None:
        """Raises unless a trace can be written, if one is requested."""
        if self.trace is None:
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
        if self.output is not None and self.trace.resolve() == self.output.resolve():
            raise SettingError(
                f"--trace and --output both name {self.trace}; give each a file of its own."
            )
        for module in ("pandas", "pyarrow"):
            import_extra(module, "traces")
        check_can_write(self.trace)

    def _write_trace(
        self, engine: Engine, lines: Sequence[PromptLine], completions: Sequence[Completion]
    ) -> None:
        """Writes the rounds, with the fields that name each prompt's kind and, as `attrs` of the
        frame, what the manifest of a saved run says."""
        if self.trace is None:
            return
        kinds = {
            name: [line.fields[name] for line in lines]
            for name in ("question_id", "category", "domain")
            if all(name in line.fields for line in lines)
        }
        rounds = Completions(completions).rounds(**kinds)
        rounds.attrs["jaxspec"] = run_fields(engine, completions)
        write_parquet(rounds, self.trace)


def _refuse(reasons: Mapping[str, tuple[bool, str]], other: str) -> None:
    """Raises for the first option that was given, and does not go together with the other."""
    for option, (is_given, reason) in reasons.items():
        if is_given:
            raise SettingError(
                f"{option} was given with {other}, and {reason}; leave one of them out."
            )


def show_completions(
    console: Console, completions: Sequence[Completion], tokenizer: TextTokenizer | None
) -> None:
    """Prints the text of completions, coloured by the tokens' origins; without a tokenizer, the
    tokens."""
    for completion in completions:
        if len(completions) > 1:
            prompt, *sample = completion.request_id.split("-")
            prompt = prompt.replace(":", ", turn ")
            name = f"prompt {prompt}" + "".join(f", completion {index}" for index in sample)
            console.rule(name, align="left")
        if tokenizer is None or completion.text is None:
            console.print(completion, soft_wrap=True)
        else:
            console.print(_coloured_text(completion, tokenizer), soft_wrap=True)
        reason = completion.finish_reason
        if completion.stop_reason is not None:
            reason += f" ({completion.stop_reason})"
        console.print(f"finished: {reason}", style="dim", highlight=False)


def _coloured_text(completion: Completion, tokenizer: TextTokenizer) -> Text:
    """The text of a completion, each token's part in the colour of its origin."""
    pieces = tokenizer.pieces(
        completion.token_ids, completion.prompt_token_ids, skip_special_tokens=True
    )
    shown, rest = Text(), completion.text or ""
    for piece, origin in zip(pieces, completion.origins, strict=True):
        shown.append(rest[: len(piece)], style=ORIGIN_STYLES[origin][0])
        rest = rest[len(piece) :]
    return shown.append(rest)


def summary(
    completions: Sequence[Completion],
    num_resumed: int,
    *,
    decode_s: float,
    output: pathlib.Path | None,
    rounds_by_draft_length: Mapping[int, int],
) -> str:
    """What was done, in a sentence. It gives no tokens per second: these mean something only next
    to plain decoding's, which `jaxspec compare` measures."""
    text = Completions(completions).summary if completions else "0 completions"
    if completions:
        text += f", {decode_s:.1f} s"
    if rounds_by_draft_length:
        chosen = ", ".join(f"{n}: {count}" for n, count in rounds_by_draft_length.items())
        text += f"; rounds by draft length {chosen}"
    if num_resumed:
        text += f"; {num_resumed} finished earlier"
    return text + (f"; written to {output}" if output is not None else "")


def _digest_of_weights(params: PyTree) -> str:
    """A digest of the values of all arrays, which are fetched from the device one at a time."""
    digest = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(params):
        values = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _settings_digest(engine: Engine, params: SamplingParams, format: str) -> str:
    """A digest of everything that a line depends on besides its prompt. Other kernels and devices
    are part of it, because they sum in another order and may choose the other of two tied tokens.

    Drafter and draft length change no token of a greedy run or under coupled verification; under
    the other verifiers they do. The seed matters only where tokens are drawn.
    """
    is_sampled = params.temperature > 0
    shape = engine.shape.decisive()
    # These follow from the verifier, or from what is recorded.
    for name in ("is_noise_shared", "needs_draft_probs", "needs_greedy_probs"):
        del shape[name]
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(engine.target.params)})
    sampling = dataclasses.asdict(params if is_sampled else dataclasses.replace(params, seed=None))
    kernels = getattr(engine.target, "kernels", None)
    computed_by = [kernels, family_of(kernels), jax.default_backend()]
    weights = _digest_of_weights(engine.executor.target_params)
    settings = [engine.target.name, weights, computed_by, shape, dtypes, sampling, format]
    if engine.config.logprobs_mode != "raw_logprobs":
        settings.append(engine.config.logprobs_mode)
    if kv_dtype_of(engine.target) is not None:
        settings.append(kv_dtype_of(engine.target))
    if not engine.executor.is_width_invariant:  # the width of the window decides ties
        settings.append(engine.verify_lengths)
    if is_sampled and not engine.verifier.is_coupled:
        described = engine.describe()
        settings += [described[name] for name in ("verifier", "drafter", "draft_length")]
        if described["draft_kv_dtype"] is not None:
            settings.append(described["draft_kv_dtype"])
        settings.append(_digest_of_weights(engine.executor.params["drafter"]))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
