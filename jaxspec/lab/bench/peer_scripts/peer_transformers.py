"""transformers' `generate`: padded batches, plain; or prompt lookup, which it has at batch 1."""

import os
import sys

import torch
import transformers
from protocol import answer, settings

batch, is_plain = settings["batch_size"], settings["drafter"] == "none"
if batch > 1 and not is_plain:
    sys.exit("transformers has no assisted decoding of batches")
torch.set_num_threads(len(os.sched_getaffinity(0)))
dtype = getattr(torch, settings["dtype"])
model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
lookup = {} if is_plain else {"prompt_lookup_num_tokens": settings["draft_length"]}


def generate(prompts, max_tokens):
    """See `protocol.answer`."""
    outputs = []
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        width = max(len(prompt) for prompt in group)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                **lookup,
            )
        outputs += out[:, width:].tolist()
    return outputs


versions = {"transformers": transformers.__version__, "torch": torch.__version__}
answer({"versions": versions, "arithmetic": settings["dtype"]}, generate)
