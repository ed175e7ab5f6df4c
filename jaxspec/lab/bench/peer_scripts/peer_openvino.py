"""OpenVINO GenAI, continuous batching: plain, or prompt lookup. The model is an exported one."""

import os

import numpy as np
import openvino
import openvino_genai
from protocol import answer, settings

is_plain, dtype = settings["drafter"] == "none", settings["dtype"]
scheduler = openvino_genai.SchedulerConfig()
scheduler.max_num_seqs, scheduler.cache_size = settings["batch_size"], 2
scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, False
scheduler.max_num_batched_tokens = 4096
properties = {
    "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
    "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype],
    **({} if is_plain else {"prompt_lookup": True}),
}
pipeline = openvino_genai.ContinuousBatchingPipeline(
    settings["model"], scheduler, "CPU", properties
)


def generate(prompts, max_tokens):
    """See `protocol.answer`."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    if not is_plain:
        config.num_assistant_tokens, config.max_ngram_size = settings["draft_length"], 4
    inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
    done = pipeline.generate(inputs, [config] * len(inputs))
    return [[int(token) for token in each.m_generation_ids[0]] for each in done]


versions = {"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__}
arithmetic = f"INFERENCE_PRECISION_HINT {properties['INFERENCE_PRECISION_HINT']}"
answer({"versions": versions, "arithmetic": arithmetic}, generate)
