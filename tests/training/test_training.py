"""Training: data, checkpoints, resume, distillation, export and acceptance, on a corpus made
here."""

import dataclasses
import json
import math
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as tiny_models
from training.test_trainer import Stopped, stop_after

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError, JaxspecError, ModelError, SettingError
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.training import checkpoints, data, export, lm, trainer
from jaxspec.training.lm import measure_acceptance
from jaxspec.training.lm_runs import load_run, load_teacher

logits_of = jax.jit(decoder.training_logits, static_argnums=0)
# What version 0.1.0 wrote of a run, with `tiny`'s settings but smaller, and its parameters' CRC-32.
OLD_RUN = pathlib.Path(__file__).parents[1] / "golden" / "old_run"
OLD_CHECKSUM = 1931387633
NOUNS = ("fox", "miller", "river", "castle", "king", "lamp")
VERBS = ("sees", "builds", "loses", "finds")


def write_corpus(root, num_documents=60):
    rng = np.random.default_rng(0)
    for domain, end in (("tales", "."), ("sums", "!")):
        lines = []
        for _ in range(num_documents):
            words = [f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} it{end}" for _ in range(20)]
            lines.append(json.dumps({"source": domain, "text": " ".join(words)}))
        (root / domain).mkdir(parents=True)
        (root / domain / "train.jsonl").write_text("\n".join(lines) + "\n")
    return root


def tiny(out, corpora, **overrides):
    settings = {
        "out": out,
        "corpora": corpora,
        "tokens": 3072,
        "batch_tokens": 128,
        "sequence_length": 32,
        "max_length": 64,
        "long_fraction": 0.15,
        "vocab_size": 300,
        "width": 32,
        "feed_forward_width": 16,
        "num_layers": 1,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "evaluate_tokens": 128,
        "checkpoint_every": 5,
    }
    return lm.TrainConfig(**(settings | overrides))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpora):
    """An uninterrupted run: its directory, its result, and the loss of every step."""
    out = tmp_path_factory.mktemp("run") / "whole"
    losses = []
    result = lm.train_lm(tiny(out, corpora), on_step=lambda _, m: losses.append(m["loss"]))
    return out, result, losses


@pytest.fixture(scope="module")
def distilled(tmp_path_factory, corpora, trained):
    """A draft distilled from `trained`: its directory and its result."""
    out = tmp_path_factory.mktemp("run") / "draft"
    teacher = str(trained[0])
    result = lm.train_lm(tiny(out, corpora, teacher=teacher, width=8, long_fraction=0.0, seed=1))
    return out, result


def leaves_of(run):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run.params)]


def are_equal(some, others):
    return all((a == b).all() for a, b in zip(some, others, strict=True))


def test_loss_falls_from_uniform_on_every_domain(trained):
    _, result, losses = trained
    uniform = math.log(300)
    assert abs(losses[0] - uniform) < 0.5
    assert losses[-1] < uniform - 1
    assert set(result["held_out_loss"]) == {"tales", "sums"}
    assert all(loss < uniform - 1 for loss in result["held_out_loss"].values())
    assert result["tokens"] == 3072
    assert result["steps"] == len(losses) == 24


def test_resumed_run_is_bit_equal_to_uninterrupted_one(tmp_path, corpora, trained):
    config = tiny(tmp_path / "part", corpora)
    with pytest.raises(Stopped):  # after the checkpoint of step 5, so steps 6 to 8 are done again
        lm.train_lm(config, on_step=stop_after(8))
    steps = []
    resumed = dataclasses.replace(config, resume=True)
    lm.train_lm(resumed, on_step=lambda step, _: steps.append(step))
    assert steps == list(range(6, 25))
    assert are_equal(leaves_of(load_run(trained[0])), leaves_of(load_run(config.out)))


def test_bit_equality_notices_one_other_row(trained):
    """Sabotage: a row that is cut one token further along changes the parameters."""
    run, optimizer = load_run(trained[0]), trainer.make_optimizer()
    how = {"loss": lm.LmLoss(run.config, None), "optimizer": optimizer}

    def after(windows):
        params = jax.tree.map(jnp.copy, run.params)  # the step donates them
        state = trainer.TrainState(params=params, optimizer=optimizer.init(params))
        batch = lm.LmBatch(data.pack(windows, 0), None)
        state, _ = trainer.train_step(state, (), batch, np.float32(0.05), **how)
        return np.asarray(state.params["embedding"])

    stream = data.map_tokens(trained[0] / "tokens" / "tales.train")
    windows = np.stack([stream[at : at + 33] for at in (0, 32)])
    shifted = np.stack([stream[at : at + 33] for at in (0, 33)])
    first = after(windows)
    assert (first == after(windows)).all()
    assert (first != after(shifted)).any()


def test_the_last_rows_are_long(trained, corpora):
    task = lm.LmTask(dataclasses.replace(tiny(trained[0], corpora), resume=True))
    [end] = task.settings.ends()
    rows = [task.batch(index, end).rows.inputs for index in range(24)]
    assert [each.shape for each in rows] == [(4, 32)] * 20 + [(2, 64)] * 4
    assert task.batch(23, None).rows.inputs.shape == (4, 32)  # on a trunk


def test_packing_separates_documents():
    #                    a  a  end b  end c  c | label of the last
    windows = np.array([[5, 6, 0, 7, 0, 8, 9, 5]], np.uint32)
    batch = data.pack(windows, 0)
    assert batch.inputs.tolist() == [[5, 6, 0, 7, 0, 8, 9]]
    assert batch.labels.tolist() == [[6, 0, 7, 0, 8, 9, 5]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert batch.weights.tolist() == [[1, 1, 0, 1, 0, 1, 1]]


def test_a_packed_document_does_not_see_its_neighbour(trained):
    run = load_run(trained[0])

    def logits(tokens, end_of_text):
        batch = data.pack(np.array([[*tokens, 1]], np.uint32), end_of_text)
        return logits_of(run.config, run.params, batch.inputs, batch.segments)[0, 4:]

    first, other = [20, 21, 22, 0, 30, 31, 32], [40, 41, 42, 0, 30, 31, 32]
    np.testing.assert_allclose(logits(first, 0), logits(other, 0), atol=1e-6)
    # Sabotage: without segments the neighbour shows.
    assert np.abs(logits(first, 299) - logits(other, 299)).max() > 1e-4


def test_plan_is_a_function_of_the_seed_and_passes_over_everything():
    streams = [np.arange(1000), np.arange(1000, 1400)]
    settings = {"num_steps": 50, "num_rows": 4, "length": 16}
    lengths = [len(stream) for stream in streams]
    plan = data.plan_rows(lengths, (3.0, 1.0), seed=(7,), **settings)
    again = data.plan_rows(lengths, (3.0, 1.0), seed=(7,), **settings)
    other = data.plan_rows(lengths, (3.0, 1.0), seed=(8,), **settings)
    assert (plan.start == again.start).all()
    assert (plan.stream == again.stream).all()
    assert (plan.start != other.start).any()
    assert abs((plan.stream == 0).mean() - 0.75) < 0.1
    seen = np.concatenate([data.cut(plan, streams, step).ravel() for step in range(50)])
    for stream in streams:  # all but what the shifted ends leave over
        assert np.isin(stream[16:-16], seen).all()
    first_pass = plan.start[plan.stream == 0][:60]
    assert len(np.unique(first_pass)) == 60
    assert (np.diff(np.sort(first_pass)) == 16).mean() > 0.9


@pytest.mark.parametrize("num_documents", [1, 200])
def test_split_is_disjoint_and_repeatable(tmp_path, num_documents):
    path = tmp_path / "d"
    path.mkdir()
    texts = [f"document {i} " + "x" * i for i in range(num_documents)]
    lines = [json.dumps({"text": text}) for text in texts]
    (path / "a.jsonl").write_text("\n".join(lines))
    domain = data.Domain.parse("d")
    train, held_out = data.read_documents(domain, tmp_path)
    assert (train, held_out) == data.read_documents(domain, tmp_path)
    assert train
    assert held_out
    assert sorted("".join(text for _, text in train + held_out)) == sorted("".join(texts))
    assert not set(train) & set(held_out)


def test_valid_file_is_held_out_and_excluded_sources_are_left_out(tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    rows = [{"source": "keep", "text": "one"}, {"source": "drop-me", "text": "two"}]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "valid.jsonl").write_text(json.dumps({"source": "keep", "text": "three"}))
    split = data.read_documents(data.Domain.parse("d=2"), tmp_path, ("drop",))
    assert split == ([("keep", "one")], [("keep", "three")])


def test_tokenizer_is_lossless_and_cutting_texts_changes_no_token(tmp_path):
    text = "Line one of 12.\n\n    Indented é 305\nTom has  2 cats\r\n" * 900
    tokenizer = data.train_tokenizer([text], 400)
    assert tokenizer.get_vocab_size() <= 400
    whole = tokenizer.encode(text).ids
    assert tokenizer.decode(whole) == text
    stream = data.write_tokens(tmp_path / "t", [text], tokenizer)
    assert len(list(data._pieces(text))) > 1
    assert stream.tolist() == [*whole, data.end_of_text_id(tokenizer)]


def test_distillation_is_perfect_only_for_the_teacher():
    p = jax.random.normal(jax.random.key(0), (2, 3, 7))
    q = jax.random.normal(jax.random.key(1), (2, 3, 7))
    weights = jnp.ones((2, 3))
    np.testing.assert_allclose(lm.distillation_loss(p, p, weights), [0, 1], atol=1e-6)
    loss, acceptance = lm.distillation_loss(q, p, weights)
    theirs, ours = np.asarray(jax.nn.softmax(p)), np.asarray(jax.nn.softmax(q))
    overlap = np.minimum(theirs, ours).sum(axis=-1).mean()
    divergence = (theirs * np.log(theirs / ours)).sum(axis=-1).mean()
    np.testing.assert_allclose(acceptance, overlap, atol=1e-6)
    np.testing.assert_allclose(loss, (divergence + 1 - overlap) / 2, atol=1e-6)
    assert overlap < 0.95


def test_distilled_draft_is_accepted_more_than_an_untrained_one(distilled, trained):
    _, result = distilled
    target, draft = load_run(trained[0]), load_run(distilled[0])
    untrained = decoder.init_params(draft.config, jax.random.key(3), jnp.float32)
    stream = data.map_tokens(distilled[0] / "tokens" / "tales.held_out")
    windows = data.held_out_windows(stream, 32, 256)
    ours, theirs = (target.config, target.params), (draft.config, untrained)
    before = measure_acceptance(ours, theirs, windows, 0)
    after = result["acceptance"]["tales"]
    assert after["sampled"] > before["sampled"] + 0.1


def test_acceptance_of_a_model_with_itself_is_one(trained):
    run = load_run(trained[0])
    stream = data.map_tokens(trained[0] / "tokens" / "sums.held_out")
    windows = data.held_out_windows(stream, 16, 128)
    pair = (run.config, run.params)
    same = measure_acceptance(pair, pair, windows, 0)
    assert same["sampled"] == pytest.approx(1, abs=1e-6)
    assert same["greedy"] == 1
    assert 0 < same["num_tokens"] <= windows[:, 1:].size
    noisy = jax.tree.map(
        lambda w: w + 0.3 * jnp.sin(jnp.arange(w.size).reshape(w.shape)), run.params
    )
    other = measure_acceptance(pair, (run.config, noisy), windows, 0)
    assert other["sampled"] < 0.99


def test_export_is_a_hugging_face_checkpoint(tmp_path, trained):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.numpy")
    run = load_run(trained[0])
    path = tmp_path / "model"
    export.write_hugging_face(
        path, run.config, run.params, run.tokenizer, dtype=np.float32, max_shard_bytes=8000
    )
    fields = transformers.AutoConfig.from_pretrained(path)
    assert fields.model_type == "qwen3"
    assert fields.tie_word_embeddings
    assert (fields.num_attention_heads, fields.num_key_value_heads, fields.head_dim) == (4, 2, 8)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    tensors = {}
    for name in set(index.values()):
        tensors |= safetensors.load_file(path / name)
    assert set(tensors) == set(index)
    assert sum(t.size for t in tensors.values()) == decoder.num_params(run.config)
    query = tensors["model.layers.0.self_attn.q_proj.weight"]  # head 3 = KV head 1, member 1
    expected = np.asarray(run.params["layers"][0]["qkv"])[:, 1, 1].T
    np.testing.assert_array_equal(query[3 * 8 : 4 * 8], expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = "The fox sees 12 lamps.\n  It is é!"
    assert tokenizer.encode(text) == run.tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert chat == "Question: Why?\nAnswer:"
    # Writing again replaces what was there and leaves nothing else after.
    export.write_hugging_face(path, run.config, run.params, run.tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not (path / "model.safetensors.index.json").exists()


def test_exported_model_has_our_logits(tmp_path, trained):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run = load_run(trained[0])
    tokens = np.array([[11, 42, 7, 99, 120, 250, 3, 64]])
    ours = logits_of(
        run.config, run.params, jnp.asarray(tokens), jnp.zeros(tokens.shape, jnp.int32)
    )

    def theirs(params):
        path = tmp_path / "model"
        export.write_hugging_face(path, run.config, params, run.tokenizer, dtype=np.float32)
        model = transformers.Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()

    np.testing.assert_allclose(theirs(run.params), ours, atol=1e-4)
    # Sabotage: query heads in another order are noticed.
    (layer,) = run.params["layers"]
    swapped = {**layer, "qkv": layer["qkv"][:, :, jnp.array([1, 0, 2, 3])]}
    assert np.abs(theirs({**run.params, "layers": (swapped,)}) - ours).max() > 1e-3


def test_mistakes_are_named(tmp_path, corpora, trained):
    def train(**overrides):
        lm.train_lm(tiny(overrides.pop("out", tmp_path / "out"), corpora, **overrides))

    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"txt": 1}\n')
    cases = [
        (SettingError, "is not a directory", lambda: train(domains=("nowhere",))),
        (SettingError, "is not of the form", lambda: train(domains=("a=x",))),
        (SettingError, "no documents", lambda: train(exclude=("tales", "sums"))),
        (SettingError, "no .jsonl", lambda: data.discover_domains(tmp_path / "empty")),
        (SettingError, "Line 1", lambda: data.read_documents(data.Domain.parse("bad"), tmp_path)),
        (
            SettingError,
            "fewer than",
            lambda: train(tokens=10**7, sequence_length=10**5, max_length=10**5),
        ),
        (SettingError, "must lie in .0, 1/6.", lambda: train(long_fraction=0.2)),
        (SettingError, "exceeds max_length", lambda: train(sequence_length=128)),
        (CheckpointError, "model exists, and what is trained", lambda: train(out=tmp_path)),
        (
            CheckpointError,
            "other values of domains, exclude, token_checksums;",
            lambda: train(out=trained[0], resume=True, exclude=("tale",), domains=("sums",)),
        ),
        (ModelError, "neither a converted directory", lambda: train(teacher=str(tmp_path))),
        (SettingError, "multiple of the number of heads", lambda: train(num_query_heads=3)),
    ]
    for error, words, mistake in cases:
        with pytest.raises(error, match=words) as caught:
            mistake()
        assert isinstance(caught.value, JaxspecError)
        assert "\n" not in str(caught.value)


def test_weights_of_an_old_run_load(tmp_path):
    """Those are all that is left of it: it cannot be resumed."""
    run = load_run(OLD_RUN)
    assert checkpoints.checksum(run.params) == OLD_CHECKSUM
    assert load_teacher(str(OLD_RUN)).config == run.config
    export.write_hugging_face(tmp_path / "model", run.config, run.params, run.tokenizer)
    out = tmp_path / "run"
    shutil.copytree(OLD_RUN, out)
    written = (out / "checkpoint.msgpack").read_bytes()
    for content in (written[:-1], written[:10], b"", written[:99] + b"x" + written[100:]):
        (out / "checkpoint.msgpack").write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_run(out)
    (out / "checkpoint.msgpack").write_bytes(written)
    (out / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_run(out)


def test_a_disk_that_is_full_is_told(tmp_path, corpora):
    tokenizer, tokens = data.train_tokenizer(["some words"], 300), tmp_path / "tokens"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(JaxspecError, match="File too large"):
            lm.train_lm(tiny(tmp_path / "out", corpora))
        with pytest.raises(JaxspecError, match="File too large"):
            data.write_tokens(tokens / "t", ["some words"] * 99, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tokens.iterdir())


def test_any_model_that_can_be_loaded_is_a_teacher(tmp_path, corpora, trained, distilled):
    """The Hugging Face directory that the run wrote teaches as the run does, but for rounding."""
    exported = load_teacher(str(trained[0] / "model"))
    own = load_teacher(str(trained[0]))
    assert exported.config == own.config
    assert exported.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    np.testing.assert_allclose(
        np.asarray(exported.params["embedding"]), np.asarray(own.params["embedding"]), atol=1e-2
    )
    padded = dataclasses.replace(own.config, vocab_size=own.config.vocab_size + 20)
    wide = tmp_path / "wide"
    params = decoder.init_params(padded, jax.random.key(0), np.float32)
    export.write_hugging_face(wide, padded, params, own.tokenizer)
    config = tiny(tmp_path / "draft", corpora, teacher=str(wide), width=8, tokens=768)
    with jax.numpy_dtype_promotion("standard"):  # for gradients of JAX's attention in bfloat16
        result = lm.train_lm(config)
    assert result["acceptance"].keys() == distilled[1]["acceptance"].keys()
    assert load_run(config.out).config.vocab_size == padded.vocab_size
    tiny_models.save(tmp_path, "no-tokenizer")
    with pytest.raises(ModelError, match="has no tokenizer, and a draft is trained on its tokens"):
        load_teacher(str(tmp_path / "no-tokenizer"))


def test_a_model_is_written_before_it_is_measured(tmp_path, corpora, trained, monkeypatch):
    def measure(*_):
        raise Stopped

    monkeypatch.setattr(lm, "measure_acceptance", measure)
    config = tiny(tmp_path / "out", corpora, teacher=str(trained[0]), width=8, tokens=768)
    with pytest.raises(Stopped):
        lm.train_lm(config)
    assert export.is_hugging_face(config.out / "model")


def test_a_draft_vocabulary_has_the_most_frequent_tokens(tmp_path, corpora, trained):
    teacher = str(trained[0] / "model")
    config = tiny(
        tmp_path / "out", corpora, teacher=teacher, draft_vocab_size=40, long_fraction=0.0
    )
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # for gradients of JAX's attention in bfloat16
        result = lm.train_lm(config, on_step=lambda _, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    streams = [data.map_tokens(config.out / "tokens" / f"{d}.train") for d in ("tales", "sums")]
    counts = np.bincount(np.concatenate(streams), minlength=300)
    model = load_model(config.out / "model", dtype="float32")
    ids = model.config.draft_vocabulary
    assert len(ids) == 40
    assert min(counts[list(ids)]) >= max(np.delete(counts, ids))
    assert model.params["embedding"].shape == (41, 32)
    assert result["num_params"] == decoder.num_params(model.config)
    assert load_run(config.out).config == model.config
    # It was measured over all tokens, and drafts for its teacher.
    assert 0.1 < result["acceptance"]["tales"]["greedy"] < 1
    engine = Engine(load_model(teacher, dtype="float32"), DraftModel(model), max_length=128)
    prompts, greedy = ["The fox sees", "The king"], SamplingParams(max_tokens=24)
    drafted = engine.generate(prompts, greedy)
    plain = engine.generate(prompts, greedy, speculate=False)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert drafted.acceptance.num_accepted_tokens > 0
    for error, words, changes in (
        (SettingError, "draft_vocab_size was given without a teacher", {"teacher": None}),
        (ModelError, "draft model of 40 tokens", {"teacher": str(config.out)}),
    ):
        with pytest.raises(error, match=words):
            lm.LmTask(dataclasses.replace(config, **changes, out=tmp_path / "other"))


def test_a_distillation_over_a_draft_vocabulary():
    """Of all other tokens together, none of which is accepted."""
    p = jax.random.normal(jax.random.key(0), (2, 3, 7))
    q = jax.random.normal(jax.random.key(1), (2, 3, 4))
    loss, acceptance = lm.distillation_loss(q, p, jnp.ones((2, 3)), (1, 2, 5))
    theirs, ours = np.asarray(jax.nn.softmax(p)), np.asarray(jax.nn.softmax(q))
    inside = theirs[..., [1, 2, 5]]
    theirs = np.concatenate([inside, 1 - inside.sum(axis=-1, keepdims=True)], axis=-1)
    overlap = np.minimum(theirs, ours)[..., :3].sum(axis=-1).mean()
    divergence = (theirs * np.log(theirs / ours)).sum(axis=-1).mean()
    np.testing.assert_allclose(acceptance, overlap, atol=1e-6)
    np.testing.assert_allclose(loss, (divergence + 1 - overlap) / 2, atol=1e-6)


# Trunk and branches: one run for many token counts

BRANCHES = (768, 1536, 3072)  # 6, 12 and 24 steps of 128 tokens, 1, 2 and 4 of them decay


def tiny_trunk(out, corpora, **overrides):
    settings = {"tokens": BRANCHES, "long_fraction": 0.0}
    return tiny(out, corpora, **(settings | overrides))


def branch_leaves(out, tokens):
    return leaves_of(load_run(out / "branches" / str(tokens)))


@pytest.fixture(scope="module")
def grown(tmp_path_factory, corpora, trained):
    """A trunk distilled from `trained` with all branches: its directory and its result."""
    out = tmp_path_factory.mktemp("run") / "trunk"
    return out, lm.train_lm(tiny_trunk(out, corpora, teacher=str(trained[0]), seed=1))


def test_branches_are_finished_models(grown):
    out, result = grown
    assert list(result["branches"]) == ["768", "1536", "3072"]
    for tokens, steps in zip(BRANCHES, (6, 12, 24), strict=True):
        own = result["branches"][str(tokens)]
        assert (own["tokens"], own["steps"]) == (tokens, steps)
        assert own == json.loads((out / "branches" / str(tokens) / "result.json").read_text())
        model = load_teacher(own["model"])  # what was exported is what was trained
        assert model.config == load_run(out / "branches" / str(tokens)).config
    losses = [np.mean(list(own["held_out_loss"].values())) for own in result["branches"].values()]
    overlaps = [own["acceptance"]["tales"]["sampled"] for own in result["branches"].values()]
    assert losses[0] > losses[1] > losses[2]
    assert overlaps[0] < overlaps[2]
    # The trunk's 20 steps, and the decays'.
    assert result["steps"] == 20 + 1 + 2 + 4
    assert result["tokens"] == 27 * 128


def test_a_branch_is_bit_equal_to_a_run_with_this_branch_alone(tmp_path, corpora, trained, grown):
    alone = tiny_trunk(tmp_path / "alone", corpora, teacher=str(trained[0]), seed=1, tokens=(1536,))
    lm.train_lm(alone)
    assert are_equal(branch_leaves(alone.out, 1536), branch_leaves(grown[0], 1536))
    # Sabotage: another order of rows is noticed.
    other = dataclasses.replace(alone, out=tmp_path / "other", domains=("tales", "sums"))
    lm.train_lm(other)
    assert not are_equal(branch_leaves(other.out, 1536), branch_leaves(grown[0], 1536))


def test_states_from_a_file_change_no_bit(tmp_path, corpora, trained, grown):
    states = tmp_path / "states" / "seed1.f32"
    with pytest.raises(SettingError, match="without a teacher"):
        tiny_trunk(tmp_path / "a", corpora, teacher_states=states)
    settings = {"teacher": str(trained[0]), "seed": 1, "teacher_states": states}
    config = tiny_trunk(tmp_path / "a", corpora, **settings)
    with pytest.raises(Stopped):
        lm.train_lm(config, on_step=stop_after(9))
    content = states.read_bytes()
    assert len(content) == 8 * 128 * 32 * 4  # the branch's row is the trunk's next
    states.write_bytes(content[:-100])  # cut off in a crash
    lm.train_lm(dataclasses.replace(config, resume=True))
    assert are_equal(branch_leaves(config.out, 3072), branch_leaves(grown[0], 3072))
    assert states.read_bytes()[: len(content)] == content
    wide = dataclasses.replace(config, out=tmp_path / "b", width=64)
    known = states.stat().st_mtime_ns
    lm.train_lm(wide)
    assert states.stat().st_mtime_ns == known, "a model of another size computed them again"
    with pytest.raises(CheckpointError, match="hidden states of another teacher or of other rows"):
        lm.train_lm(dataclasses.replace(wide, out=tmp_path / "c", seed=2))
    # Sabotage: states that are not the teacher's are noticed.
    other = np.frombuffer(states.read_bytes(), np.float32) * np.float32(1.01)
    states.write_bytes(other.tobytes())
    again = dataclasses.replace(config, out=tmp_path / "d")
    lm.train_lm(again)
    assert not are_equal(branch_leaves(again.out, 3072), branch_leaves(grown[0], 3072))


def test_rows_of_a_plan_do_not_depend_on_its_end():
    settings = {"num_rows": 3, "length": 8}
    long = data.plan_rows((100, 300), (1.0, 2.0), num_steps=60, seed=(4,), **settings)
    short = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(4,), **settings)
    other = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(5,), **settings)
    assert (long.stream[:25] == short.stream).all()
    assert (long.start[:25] == short.start).all()
    assert (other.start != short.start).any()


def test_the_step_is_compiled_once_for_trunk_and_branches(tmp_path, corpora):
    jax.clear_caches()
    lm.train_lm(tiny_trunk(tmp_path / "out", corpora))
    assert trainer.train_step._cache_size() == 1
