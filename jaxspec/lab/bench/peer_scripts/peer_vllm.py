"""vLLM on a CPU: plain, or its n-gram drafter."""

import os

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)
import torch
import vllm
from protocol import answer, settings


def main():
    """Loads the engine and answers."""
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": settings["draft_length"],
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=settings["batch_size"],
        enable_prefix_caching=False,
        **({} if settings["drafter"] == "none" else {"speculative_config": speculation}),
    )

    def generate(prompts, max_tokens):
        """See `protocol.answer`."""
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    answer({"versions": versions, "arithmetic": settings["dtype"]}, generate)


if __name__ == "__main__":  # vLLM may start processes of its own
    main()
