"""Scripts of ten lines that write another system's outputs in the format of `audit.outputs`."""

import importlib.resources

NAMES = ("vllm", "sglang", "hf", "openvino", "llama_cpp")


def snippet(name: str) -> str:
    """The script for one of `NAMES`; MODEL stands for the model's name."""
    return importlib.resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
