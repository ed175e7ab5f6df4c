"""The steps of the conversion, in order: find, check, stream, verify, move into place."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint import format as checkpoint
from jaxspec.checkpoint.manifest import write_manifest
from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import check_not_forked
from jaxspec.runtime.directories import atomic_directory, check_free_space
from jaxspec.runtime.files import expand_user, is_there, reading

from . import glm4, hf_config, hf_reader, hub, llama, mistral, qwen2, qwen3
from .gguf_reader import GgufFile
from .known import is_gguf, refuse_known
from .mapping import Family
from .tokenizer import convert_tokenizer
from .writer import stream_params

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    glm4.FAMILY,
)
_OVERHEAD_BYTES = 64 * 2**20  # tokenizer and Orbax's own files


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionSummary:
    """What a conversion read and wrote.

    Attributes:
      source: the checkpoint, as the caller named it.
      revision: the commit if the source is a hub id, otherwise None.
      destination: the converted directory.
      config: the model's architecture.
      dtype: of the stored parameters.
      num_params: number of parameters.
      num_bytes: size of the stored parameters.
      num_files: number of weight files read.
      eos_token_ids: stop tokens.
      prefix_token_ids: token ids that are put in front of text; None if there is no tokenizer.
      duration_s: seconds that the whole conversion took.
      verification: a sentence with the largest logit difference from torch, or None if not
        requested.
    """

    source: str
    revision: str | None
    destination: Path
    config: ModelConfig
    dtype: str
    num_params: int
    num_bytes: int
    num_files: int
    eos_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...] | None
    duration_s: float
    verification: str | None = None

    def __str__(self) -> str:
        config = self.config
        revision = f" at {self.revision[:12]}" if self.revision else ""
        if self.prefix_token_ids is None:
            tokenizer = "none found; prompts must be token ids"
        else:
            prefix = list(self.prefix_token_ids) or "nothing"
            tokenizer = f"stored; {prefix} goes in front of text"
        lines = {
            "source": f"{self.source}{revision}, weight files: {self.num_files}",
            "destination": str(self.destination),
            "model": f"{config.family}, {config.num_layers} layers of width {config.width}, "
            f"vocabulary {config.vocab_size}",
            "parameters": f"{self.num_params:,} in {self.dtype}, {self.num_bytes / 2**20:,.1f} MiB",
            "tokenizer": tokenizer,
            "stop tokens": ", ".join(map(str, self.eos_token_ids)) or "none",
            "verification": self.verification,
            "time": f"{self.duration_s:.1f} s",
        }
        return "\n".join(f"{name:13} {line}" for name, line in lines.items() if line is not None)


def convert(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    dtype: Any = None,
    revision: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> ConversionSummary:
    """Converts a Hugging Face checkpoint, or a GGUF file, to a jaxspec directory.

    `dst` is absent or complete at every moment, even if the process is killed. The process's own
    memory stays under the largest shard plus 1 GiB, whatever the model's size (except with
    `verify`, which loads the model twice).

    Args:
      src: local directory, GGUF file (one of them, if it is split), or a hub id.
      dst: directory to write.
      dtype: that of the stored parameters; None is the checkpoint's own, and bfloat16 for a GGUF
        file that is not in float32.
      revision: branch, tag or commit of a hub id.
      overwrite: replace `dst` if it exists.
      verify: compare logits with torch before `dst` appears (needs the `parity` extra).
      progress: draw a progress bar, on a terminal.

    Raises:
      ModelError: the model is not found, or its architecture is not supported.
      CheckpointError: files are missing, damaged, not readable by this process, or do not belong
        together; `dst` exists; the disk is full; the logits differ from torch's.
      SettingError: this process was forked from one that had used JAX.
    """
    check_not_forked()
    directory = expand_user(src)
    if is_there(directory) and (os.path.isdir(directory) or is_gguf(directory)):
        if revision is not None:
            raise ModelError(
                f"A revision ({revision}) was given for {src}, which is on this machine; "
                "revisions are for hub ids, so leave it out."
            )
        commit = None
    else:
        if os.path.isfile(directory):
            refuse_known(directory)
        commit, directory = hub.download(os.fspath(src), revision)
    with reading(directory):
        return convert_directory(
            directory,
            dst,
            source=os.fspath(src),
            dtype=dtype,
            revision=commit,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
        )


def convert_directory(
    directory: Path,
    dst: str | os.PathLike,
    *,
    source: str,
    dtype: Any = None,
    revision: str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> ConversionSummary:
    """`convert` for local files; `source` and `revision` say where they came from."""
    started = time.perf_counter()
    gguf = GgufFile(directory) if is_gguf(directory) else None
    if gguf is None:
        refuse_known(directory)
    hf = gguf.config() if gguf else hf_reader.read_config(directory)
    family = find_family(hf)
    config = read_model_config(hf, family)
    generation_config = hf_reader.read_generation_config(directory)
    eos_token_ids = hf_reader.eos_token_ids(hf, generation_config, vocab_size=config.vocab_size)

    files = gguf.files if gguf else hf_reader.weight_files(directory)
    tensors = gguf.tensors if gguf else hf_reader.read_tensors(files)
    if config.is_tied and not hf_reader.repeats_embedding(tensors):
        config = dataclasses.replace(config, is_tied=False)  # as transformers 5 reads it
    leaves = family.leaves(config)
    expected = {name: shape for leaf in leaves for name, shape in leaf.sources.items()}
    hf_reader.check_tensors(tensors, expected, where=str(directory))

    stored = np.dtype(
        checkpoint.parse_dtype(dtype) if dtype is not None else _common_dtype(tensors, expected)
    )
    num_params = decoder.num_params(config)
    num_bytes = num_params * stored.itemsize
    dst = Path(dst)
    may_replace = checkpoint.is_converted
    with atomic_directory(dst, overwrite=overwrite, may_replace=may_replace) as working:
        needed = num_bytes + _largest_leaf_bytes(config, stored) + _OVERHEAD_BYTES
        check_free_space(working, needed, what=f"Converting {source}")
        # The quick part first, so that a fault in the tokenizer's files shows before the weights
        # are converted.
        with tempfile.TemporaryDirectory() as scratch:
            of_tokenizer = directory
            if gguf:
                of_tokenizer = Path(scratch) / directory.name
                gguf.write_tokenizer(of_tokenizer)
            try:
                prefix = convert_tokenizer(
                    of_tokenizer,
                    working / "tokenizer",
                    model_type=family.name,
                    vocab_size=config.vocab_size,
                )
            except CheckpointError as error:  # which names the GGUF file, not what was made of it
                raise CheckpointError(
                    str(error).replace(str(of_tokenizer), str(directory))
                ) from error
        with _progress_bar(num_bytes, label=dst.name, is_shown=progress) as advance:
            stream_params(working, config, leaves, tensors, dtype=stored, advance=advance)
        write_manifest(
            working,
            config=config,
            dtype=stored,
            eos_token_ids=eos_token_ids,
            prefix_token_ids=prefix or (),
            generation_config=generation_config.fields,
            source=source,
            revision=revision,
        )
        verification = None
        if verify:
            from .verify import compare_logits

            verification = compare_logits(directory, working)
    return ConversionSummary(
        source=source,
        revision=revision,
        destination=dst,
        config=config,
        dtype=stored.name,
        num_params=num_params,
        num_bytes=num_bytes,
        num_files=len(files),
        eos_token_ids=eos_token_ids,
        prefix_token_ids=prefix,
        duration_s=time.perf_counter() - started,
        verification=verification,
    )


def find_family(hf: hf_config.HFConfig) -> Family:
    """The family of a `config.json`, by its architecture (or model type, if it names none).

    Raises:
      ModelError: it is not supported; the message lists those that are.
    """
    named = hf.texts("architectures")
    given = named[0] if named else hf.text("model_type", "nothing")
    for family in FAMILIES:
        if given in (family.architectures if named else (family.name,)):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    is_chatglm = str(given).startswith("ChatGLM")
    hint = " (of GLM-4, the 0414 releases, which are Glm4ForCausalLM)" * is_chatglm
    raise ModelError(
        f"{hf.path} names the architecture {given}, which is not supported; "
        f"choose a model of one of these: {supported}{hint}."
    )


def read_model_config(hf: hf_config.HFConfig, family: Family) -> ModelConfig:
    """Our configuration for a `config.json`; raises an error of one sentence for anything that does
    not fit."""
    hf_config.refuse_unsupported(hf)
    return family.read_config(hf)


def _common_dtype(tensors: dict[str, hf_reader.Tensor], expected: dict[str, Any]) -> np.dtype:
    """The dtype that holds most of the parameters: a few norms may be kept wider."""
    sizes: collections.Counter[np.dtype] = collections.Counter()
    for name, shape in expected.items():
        sizes[tensors[name].dtype] += int(np.prod(shape))
    return sizes.most_common(1)[0][0]


def _largest_leaf_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    shapes = checkpoint.leaf_shapes(config).values()
    return max(int(np.prod(shape)) for shape in shapes) * dtype.itemsize


@contextlib.contextmanager
def _progress_bar(num_bytes: int, *, label: str, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes written."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from jaxspec.runtime.console import Console

    console = Console(stderr=True)
    with Progress(
        TextColumn("converting {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        disable=not (is_shown and console.is_terminal),
    ) as bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda written: bar.advance(task, written)
