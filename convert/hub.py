"""Fetches the files of a model from the Hugging Face hub by its id."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from jaxspec.errors import ModelError, SettingError
from jaxspec.runtime.directories import check_free_space
from jaxspec.runtime.files import first_line

from .known import refuse_known

# What `load_model` takes, for messages.
NAMES_OF_MODELS = (
    "name a converted directory, a Hugging Face directory, a GGUF file, a hub id such as "
    "Qwen/Qwen3-0.6B, "
    "random:PRESET, demo-target or demo-draft"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)


# A function of a repository's files, and of a function that fetches those matching some patterns;
# returns the fetched directory.
Choose: TypeAlias = Callable[[Iterable[str], Callable[[list[str]], Path]], Path]


def weight_patterns(files: Iterable[str]) -> str:
    """Matches one form of a model's weights: safetensors if there are any."""
    has_safetensors = any(f.startswith("model") and ".safetensors" in f for f in files)
    return "model*.safetensors*" if has_safetensors else "pytorch_model*.bin*"


def _files_of_model(files: Iterable[str], fetch: Callable[[list[str]], Path]) -> Path:
    return fetch([*_HUB_PATTERNS, weight_patterns(files)])


def download(
    name: str,
    revision: str | None,
    *,
    choose: Choose = _files_of_model,
    what: str = "model",
    names: str = NAMES_OF_MODELS,
) -> tuple[str, Path]:
    """Fetches a model from the hub, or finds it in the hub's own cache.

    Only config, tokenizer and one form of the weights are fetched, after checking the free space.

    Args:
      name: a hub id.
      revision: branch, tag or commit; None is the main branch.
      choose: chooses files other than a model's.
      what: what is looked for, for the message about a name that is not a hub id.
      names: the names that are possible, for the same message.

    Returns:
      the commit, and the directory of the files.

    Raises:
      ModelError: the name is not a hub id, there is no such model, the download fails, or the hub
        cannot be reached and its cache does not have it.
      CheckpointError: the disk lacks the space.
      SettingError: there is no directory to download to.
    """
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no {what} at {name!r}; {names}.")
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_CACHE.startswith("~"):
        raise SettingError(
            "There is no home directory to download to (HOME is not set); name a directory with "
            "HF_HOME."
        )
    shown = name if revision is None else f"{name} at revision {revision}"
    try:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelError(
            f"{shown} is neither a local directory nor a model that the hub shows to you; check "
            "the name, and log in (hf auth login) if the model is gated."
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(
            f"The hub refused {shown} ({error}); log in (hf auth login) if the model is gated."
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{shown} is neither a local directory nor a hub id ({error}).") from error
    except Exception as error:  # whatever this hub version's HTTP library raises offline
        with contextlib.suppress(errors.LocalEntryNotFoundError, OSError):
            snapshot = hub.snapshot_download(name, revision=revision, local_files_only=True)
            return Path(snapshot).name, Path(snapshot)
        raise ModelError(
            f"{shown} is not a local directory, and the hub cannot be reached to look for it; "
            "check the name or the network, or name demo-target, demo-draft or random:PRESET, "
            "which need neither."
        ) from error

    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    refuse_known(Path(name), files)

    def fetch(patterns: list[str]) -> Path:
        wanted = hub.utils.filter_repo_objects(files, allow_patterns=patterns)
        num_bytes = sum(files[file] for file in wanted)
        check_free_space(constants.HF_HUB_CACHE, num_bytes, what=f"Downloading {shown}")
        try:
            snapshot = hub.snapshot_download(name, revision=info.sha, allow_patterns=patterns)
        except Exception as error:  # from the HTTP library, or from the disk
            raise ModelError(
                f"{shown} could not be downloaded ({first_line(error)}); run the command again, "
                "which continues, or log in (hf auth login) if the model is gated."
            ) from error
        return Path(snapshot)

    return str(info.sha), choose(files, fetch)
