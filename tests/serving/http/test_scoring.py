"""Log-probabilities of prompts over HTTP: those of generating the same tokens, to the bit; and, in
float32, those of transformers."""

from __future__ import annotations

import hf_checkpoints
import httpx
import numpy as np
import pytest
import tiny
from served import MODEL, served

import jaxspec
from jaxspec import DraftModel, Engine, NGram
from jaxspec.kernels import cpu
from jaxspec.requests.prompts import sample_prompts
from jaxspec.serving.http import protocol

LENGTHS = (900, 1, 7, 300, 129, 40, 60, 121)
PER_TOKEN = 1e-4  # most difference from transformers


@pytest.fixture(scope="module")
def bfloat16():
    """The address of a server in bfloat16."""
    names = ("demo-target", "demo-draft")
    target, draft = (jaxspec.load_model(name, dtype="bfloat16") for name in names)
    settings = {"batch_size": 4, "max_length": 1024, "draft_length": 3, "max_logprobs": 1}
    with served(Engine(target, DraftModel(draft), **settings)) as (url, _):
        yield url


def ask(url, prompts, **fields):
    """The choices for prompts of token ids, greedily."""
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "logprobs": 1, **fields}
    response = httpx.post(url + "/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def score(url, prompts, max_tokens=1):
    """Log-probabilities of the prompts' tokens, asked for as lm-eval does."""
    found = ask(url, prompts, echo=True, max_tokens=max_tokens)
    return [
        one["logprobs"]["token_logprobs"][: len(prompt)]
        for one, prompt in zip(found, prompts, strict=True)
    ]


def check_bits(url, max_tokens):
    """A request with eight prompts, the longest of 900 tokens, that were generated in part."""
    prompts = [[5 + token % 200 for token in range(length)] for length in LENGTHS]
    fields = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    made = ask(url, prompts, **fields)
    whole = [one["prompt_token_ids"] + one["token_ids"] for one in made]
    for prompt, one, found in zip(prompts, made, score(url, whole, max_tokens), strict=True):
        assert found[0] is None
        assert found[len(prompt) :] == one["logprobs"]["token_logprobs"]


@pytest.mark.slow
@pytest.mark.as_shipped
@pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_they_have_the_bits_that_generating_the_tokens_reports(bfloat16, max_tokens):
    check_bits(bfloat16, max_tokens)


@pytest.mark.as_shipped
@pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")
@pytest.mark.parametrize("by", [1, -1])
def test_prompt_logprobs_that_are_shifted_by_one_are_seen(bfloat16, monkeypatch, by):
    real = protocol.completion_logprobs

    def shifted(tokenizer, token_ids, logprobs, *, offsets):
        found = real(tokenizer, token_ids, logprobs, offsets=offsets)
        if logprobs[0] is None:  # of a prompt
            first, *values = found["token_logprobs"]
            found["token_logprobs"] = [first, *np.roll(values, by).tolist()]
        return found

    monkeypatch.setattr(protocol, "completion_logprobs", shifted)
    with pytest.raises(AssertionError, match=r"assert \[-"):
        check_bits(bfloat16, 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint in float32 with a tokenizer, its torch model, and the address of a server."""
    torch = pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": tiny.VOCAB, "max_position_embeddings": 1024}
    torch_model = hf_checkpoints.write(directory, "llama", **sizes)
    tiny.tokenizer().hf.save_pretrained(directory)
    settings = {"batch_size": 4, "max_length": 1024, "draft_length": 3, "max_logprobs": 1}
    engine = Engine(jaxspec.load_model(str(directory)), NGram(1, 3), **settings)

    def logprobs(token_ids):
        """Of each token after the first, and whether it is the likeliest."""
        with torch.no_grad():
            every = torch_model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
        following = torch.tensor(token_ids[1:])
        found = every.gather(1, following[:, None])[:, 0]
        return found.tolist(), (every.argmax(-1) == following).tolist()

    with served(engine) as (url, _):
        yield directory, logprobs, url


def test_in_float32_they_are_those_of_transformers(checkpoint):
    _, logprobs, url = checkpoint
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, tiny.VOCAB, length).tolist() for length in LENGTHS]
    scored = score(url, prompts)
    for prompt, found in zip(prompts[:1] + prompts[2:], scored[:1] + scored[2:], strict=True):
        np.testing.assert_allclose(found[1:], logprobs(prompt)[0], atol=PER_TOKEN)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(found[2:], logprobs(prompt)[0][:-1], atol=PER_TOKEN)


@pytest.mark.slow
def test_log_likelihoods_of_lm_eval_are_those_of_transformers(checkpoint):
    """Two hundred, asked for by the client that lm-eval's tasks use."""
    clients = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    directory, logprobs, url = checkpoint
    client = clients.LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=MODEL,
        tokenizer=str(directory),
        tokenizer_backend="huggingface",
        batch_size=8,
        max_length=1024,
    )
    text = " ".join(line.prompt for line in sample_prompts())
    places = [(7 * index, 7 * index + length) for index, length in enumerate(range(40, 240))]
    pairs = [(text[start:end], text[end : end + 20]) for start, end in places]
    pairs[0] = (text[:890], text[890:899])
    # Some are what the model would say.
    likeliest = ask(url, [client.tok_encode(start) for start, _ in pairs[1:31]], max_tokens=1)
    for index, choice in enumerate(likeliest, start=1):
        if choice["text"].isascii() and choice["text"].strip().isprintable():
            pairs[index] = (pairs[index][0], choice["text"].strip() or pairs[index][1])
    asked = [
        Instance("loglikelihood", {}, pair, index, metadata=("task", index, 1))
        for index, pair in enumerate(pairs)
    ]
    found = client.loglikelihood(asked)
    assert len(found) == 200
    num_greedy = 0
    for pair, (value, is_greedy) in zip(pairs, found, strict=True):
        context, continuation = client._encode_pair(*pair)
        values, are_likeliest = logprobs([*context, *continuation])
        assert abs(value - sum(values[-len(continuation) :])) < PER_TOKEN * len(continuation)
        assert is_greedy == all(are_likeliest[-len(continuation) :])
        num_greedy += is_greedy
    assert num_greedy > 0
