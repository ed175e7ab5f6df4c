"""Files that `jaxspec generate` writes: lines that a later run can continue, and traces."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.errors import SettingError
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import PromptLine
from jaxspec.runtime.directories import check_regular_file, write_atomically
from jaxspec.runtime.documents import json_text
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.signals import uninterrupted
from jaxspec.types import Origin


def cannot_write(path: pathlib.Path, error: OSError, advice: str) -> SettingError:
    """The error of an output that cannot be written, and what to do about it."""
    return SettingError(f"The output {path} cannot be written ({error.strerror}); {advice}.")


def write_parquet(frame: Any, path: pathlib.Path) -> None:
    """Writes a frame; the file appears complete, or the older one stays.

    Raises:
      SettingError: it cannot be written.
    """
    content = io.BytesIO()
    frame.to_parquet(content, engine="pyarrow", index=False)
    write_atomically(path, content.getvalue())


@contextlib.contextmanager
def only_writer_of(path: pathlib.Path | None, *, resume: bool) -> Iterator[None]:
    """Makes an output file and keeps other processes from writing it while the block runs; without
    a path it does nothing.

    Raises:
      SettingError: it cannot be written, exists although `resume` is False, or is being written by
        another process.
    """
    with contextlib.ExitStack() as stack:
        if path is not None:
            try:
                check_regular_file(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_writer(path.resolve()))
                with open(path, "ab") as file:
                    num_bytes = file.tell()
            except OSError as error:
                raise cannot_write(path, error, "name another file") from error
            if num_bytes and not resume:
                raise SettingError(
                    f"The output {path} exists; add --resume to continue it, or name another file."
                )
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An output file that is always an ordered prefix of the whole.

    Every line begins with a note of its index, its prompt and the settings. From these a run
    recognises the lines of an earlier one, of which the last may have been cut off by a kill.

    Attributes:
      path: the file.
      format: `jsonl` or `spec-bench`.
      model_name: for Spec-Bench's `model_id`.
      settings: digest of the settings that the outputs depend on.
      first: index of the first line, if it is a shard.
    """

    path: pathlib.Path
    format: str
    model_name: str
    settings: str
    first: int = 0

    def continue_with(self, prompts: Sequence[tuple[int, ...]]) -> int:
        """Number of finished lines, one per prompt (a prompt with several completions has as many
        lines); removes a line that was cut off.

        Raises:
          SettingError: the lines do not belong to these prompts and settings; the file is left as
            it is.
        """
        advice = "resume with the same inputs and settings, or name another output."
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise cannot_write(self.path, error, "name another file") from error
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
            os.truncate(self.path, len(content) - len(rest))
        return len(lines)

    def append(
        self, lines: Sequence[PromptLine], batch: Sequence[Completion], first: int, share_s: float
    ) -> None:
        """Adds a batch of completions and the prompts' lines after the first `first` lines, and
        returns when it is on the disk; `share_s` is the batch's seconds divided by its rows.

        Raises:
          SettingError: it cannot be written; the file then ends with the previous batch.
        """
        make = spec_bench_line if self.format == "spec-bench" else jsonl_line
        content = b""
        for index, (line, completion) in enumerate(zip(lines, batch, strict=True), first):
            fields = make(line, completion, model_name=self.model_name, share_s=share_s)
            note = {"jaxspec": self._note(index, completion.prompt_token_ids)}
            content += json_text(note | fields).encode() + b"\n"
        try:
            with uninterrupted, open(self.path, "ab", buffering=0) as file:
                num_bytes = file.tell()
                try:
                    written = 0
                    while written < len(content):  # a disk that fills up writes only a part
                        written += file.write(content[written:])
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(num_bytes)
                    raise
        except OSError as error:
            advice = "make room and run again with --resume, the finished lines are kept"
            raise cannot_write(self.path, error, advice) from error

    def _note(self, index: int, prompt: Sequence[int]) -> dict[str, Any]:
        return {"index": self.first + index, "prompt": _digest(prompt), "settings": self.settings}


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
