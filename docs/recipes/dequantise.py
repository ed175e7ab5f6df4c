"""A Hugging Face directory in bfloat16 of a GGUF file, for engines that do not read GGUF.

    python docs/recipes/dequantise.py FILE.gguf DIRECTORY

Needs torch, transformers, gguf and accelerate. transformers does not save a model that it read from
GGUF, so its weights are put into a new one.
"""

import pathlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main(source: str, out: str):
    """Reads the file and writes the directory."""
    path = pathlib.Path(source)
    given = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    read = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**given).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
