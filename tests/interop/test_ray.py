"""Engines in the actors of a Ray cluster give what one engine gives, also after kills. These tests
need the extra `ray`, and start clusters on this machine."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

import jaxspec
from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import seeds
from jaxspec.telemetry.counters import Acceptance

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster

from jaxspec.commands.ray import finished_rows
from jaxspec.interop.ray import FirstFingerprint, Predictor, predict, seed_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.as_shipped]

NUM_PROMPTS, SEED = 500, 7
OPTIONS = (
    *("--target", "demo-target", "--draft", "demo-draft", "--max-tokens", "5", "--seed", str(SEED)),
    *("--temperature", "1", "--max-length", "256", "--batch-size", "2"),
)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node, which believes to have four CPUs."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def lines():
    """Prompts of three kinds."""
    texts = [line.prompt[:30] for line in sample_prompts()]
    kinds = (
        lambda index: {"prompt": f"{index} {texts[index % len(texts)]}"},
        lambda index: {"prompt_token_ids": [1 + index % 300, 5, 6]},
        lambda index: {"prompt": texts[index % len(texts)][: 5 + index % 20]},
    )
    return [kinds[index % 3](index) for index in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def prompts(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def engine():
    target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
    return Engine(target, DraftModel(draft), batch_size=2, max_length=256)


@pytest.fixture(scope="module")
def expected(engine, lines):
    params = SamplingParams(max_tokens=5, temperature=1, seed=SEED)
    return engine.generate(lines, seeds(params, NUM_PROMPTS))


def start(cluster, *words):
    """`jaxspec generate` with a cluster, as a process."""
    command = [sys.executable, "-m", "jaxspec", "generate", *OPTIONS, "--json"]
    return subprocess.Popen(
        [*command, "--ray", cluster.address, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cluster, *words):
    """The document of a command that succeeds."""
    process = start(cluster, *words)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def refused(cluster, *words):
    """The sentence of a command that fails."""
    process = start(cluster, *words)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1, err
    return err.splitlines()[-1]


def read(directory):
    """All rows, by id."""
    rows = [
        row
        for path in sorted(directory.glob("*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "an id is there twice"
    return by_id


def check(directory, expected, document):
    """All rows are the engine's, and what they accepted adds up."""
    rows = read(directory)
    assert sorted(rows) == list(range(len(expected)))
    for index, one in enumerate(expected):
        row = rows[index]
        assert row["token_ids"] == list(one.token_ids), index
        assert (row["text"], row["finish_reason"]) == (one.text, one.finish_reason)
    parts = [each for path in directory.glob("*.parquet") for each in finished_rows(path)]
    assert Acceptance.total([part["acceptance"] for part in parts]) == expected.acceptance
    assert document["acceptance"] == expected.acceptance.to_json()
    assert document["num_resumed"] + document["num_completions"] == len(expected)
    assert {row["fingerprint"] for row in rows.values()} == set(document["fingerprints"])


def until(holds, process=None):
    end_s = time.monotonic() + 300
    while not holds():
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s
        time.sleep(0.05)


def actors():
    """The processes of actors that hold an engine."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "MapBatches(Predictor)" in " ".join(process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_any_number_of_actors_gives_what_an_engine_gives(
    cluster, prompts, expected, tmp_path, num_replicas
):
    out = tmp_path / "out"
    words = ("--prompts", prompts, "--output", out, "--num-replicas", num_replicas)
    document = run(cluster, *words)
    check(out, expected, document)
    [_] = document["fingerprints"]


def test_killed_actors_and_drivers_lose_and_repeat_nothing(cluster, prompts, expected, tmp_path):
    out = tmp_path / "out"
    words = ("--prompts", prompts, "--output", out, "--num-replicas", 2)
    process = start(cluster, *words)

    def num_files():
        return len(list(out.glob("*.parquet")))

    until(lambda: num_files() >= 2, process)
    actors()[0].kill()
    seen = num_files()
    until(lambda: num_files() >= seen + 4, process)  # the other alone has at most two batches
    process.kill()
    process.communicate()
    until(lambda: not actors())
    num_finished = len(read(out))
    assert 0 < num_finished < NUM_PROMPTS

    fewer = prompts.with_name("fewer.jsonl")
    fewer.write_text("\n".join(prompts.read_text().splitlines()[:-1]) + "\n")
    assert "add --resume to continue it" in refused(cluster, *words)
    other = refused(cluster, *words, "--max-tokens", 4, "--resume")
    assert "has another prompt or other settings" in other
    shape = refused(cluster, *words, "--max-length", 128, "--resume")
    assert "has another prompt or other settings" in shape
    assert len(read(out)) == num_finished

    document = run(cluster, *words, "--resume")
    assert document["num_resumed"] == num_finished
    check(out, expected, document)
    # Nothing is left to do, so no actor would see that it has another model.
    other = refused(cluster, *words, "--target", "demo-draft", "--resume", "--mixed-nodes")
    assert "has another prompt or other settings" in other
    again = run(cluster, *words, "--resume")
    assert (again["num_resumed"], again["num_completions"]) == (NUM_PROMPTS, 0)
    check(out, expected, again)


def test_completions_of_a_prompt_have_the_seeds_of_a_run_without_ray(cluster, tmp_path):
    """And a list of messages, and settings of the sampling, mean the same."""
    prompts = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "Why?"}]
    prompts.write_text(f'{{"prompt": "Once"}}\n\n{json.dumps({"messages": chat})}\n')
    more = ("--prompts", prompts, "--n", 2, "--chat-template", "vicuna")
    more += ("--sampling-args", '{"top_k": 50, "logit_bias": {"7": 3}, "logprobs": 2}')
    document = run(cluster, *more, "--output", tmp_path / "out")
    assert document["num_completions"] == 4
    lines = tmp_path / "lines.jsonl"
    words = [sys.executable, "-m", "jaxspec", "generate", *OPTIONS, *map(str, more)]
    subprocess.run([*words, "--output", lines], check=True, capture_output=True)
    rows = read(tmp_path / "out")
    for index, line in enumerate(map(json.loads, lines.read_text().splitlines())):
        assert rows[index]["token_ids"] == line["token_ids"]
        assert json.loads(rows[index]["logprobs"]) == line["logprobs"]
    assert len({tuple(row["token_ids"]) for row in rows.values()}) == 4


def test_what_is_refused(cluster, prompts, tmp_path):
    words = ("--prompts", prompts, "--output", tmp_path / "out")
    few = refused(cluster, *words, "--num-replicas", 4)
    assert "the cluster has 4 CPUs, of which Ray needs one; ask for fewer" in few
    nobody = refused(cluster, *words, "--ray", "127.0.0.1:1")
    assert "--ray 127.0.0.1:1 was given, where no cluster answers" in nobody
    assert "no cluster answers" in refused(cluster, *words, "--ray", "nonsense")
    long = tmp_path / "long.txt"
    long.write_text("Once\n" + "word " * 300 + "\n")
    found = refused(cluster, "--prompts", long, "--output", tmp_path / "o")
    assert "The row 1 has " in found
    assert "leaves room for" in found
    (tmp_path / "out" / "000000.parquet").write_bytes(b"PAR1")
    assert "was not written by this command" in refused(cluster, *words, "--resume")
    (tmp_path / "out" / "000000.parquet").unlink()
    (tmp_path / "out" / "000000.parquet").mkdir()
    assert "000000.parquet cannot be read (" in refused(cluster, *words, "--resume")
    (tmp_path / "out" / "whole.parquet").touch()
    assert "has whole.parquet, which this command did not" in refused(cluster, *words, "--resume")
    on_a_file = refused(cluster, "--prompts", long, "--output", long)
    assert f"Nothing can be written into {long} (Not a directory)" in on_a_file


def test_a_node_with_another_fingerprint_is_refused(prompts, tmp_path):
    """A node with another option of XLA's continues what a node without it has begun."""
    words = ("--prompts", prompts, "--output", tmp_path / "out")
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        [first] = run(cluster, *words, "--limit", 10)["fingerprints"]
        cluster.remove_node(node)
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"
        cluster.add_node(num_cpus=2, env_vars={"XLA_FLAGS": flags.strip()})
        cluster.wait_for_nodes()
        more = (*words, "--limit", 20, "--resume")
        assert f"and rows before it have {first}: another processor" in refused(cluster, *more)
        mixed = run(cluster, *more, "--mixed-nodes")
        assert (mixed["num_resumed"], len(mixed["fingerprints"])) == (10, 2)
        assert "its rows have 2 fingerprints, without --mixed-nodes" in refused(cluster, *more)
    finally:
        cluster.shutdown()


def test_the_first_who_asks_decides():
    asked = FirstFingerprint()
    assert [asked.agree("a"), asked.agree("b"), FirstFingerprint("c").agree("d")] == ["a", "a", "c"]


@pytest.fixture
def driver(cluster):
    """This process as a driver of the cluster."""
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_a_dataset_of_any_rows(driver, engine):
    """Ids that are text, parameters in columns, and a column of the user's."""
    sampled = {"max_tokens": 3, "temperature": 1.0}
    rows = [
        {"id": "a", "prompt": "Once", "params": {"max_tokens": 4, "seed": 3}, "kind": "tale"},
        # Arrow gives both dicts both tokens, null where it was not given.
        {
            "id": "b",
            "prompt": "def f",
            "params": sampled | {"logit_bias": {"7": 3.0}},
            "kind": "code",
        },
        {
            "id": "c",
            "prompt": "Once",
            "params": sampled | {"logit_bias": {"8": 2.0}},
            "kind": "tale",
        },
    ]
    make = functools.partial(
        Engine, "demo-target", drafter="demo-draft", batch_size=2, max_length=256
    )
    dataset = predict(ray.data.from_items(rows), make, num_replicas=1, batch_size=16)
    found = {row["id"]: row for row in dataset.take_all()}
    assert [found[name]["kind"] for name in "abc"] == ["tale", "code", "tale"]
    params = [{**row["params"], "seed": seed_of(row["id"])} for row in rows]
    params[0]["seed"] += 3
    for row, one in zip(rows, engine.generate([r["prompt"] for r in rows], params), strict=True):
        assert found[row["id"]]["token_ids"] == list(one.token_ids)
        counts = {name: found[row["id"]][name] for name in vars(Acceptance())}
        assert counts == {name: one.acceptance.to_json()[name] for name in counts}


def test_log_probabilities_are_columns_and_mistakes_name_the_row():
    engine = Engine(
        "demo-target", drafter="demo-draft", batch_size=2, max_length=64, max_logprobs=2
    )
    predictor = object.__new__(Predictor)  # outside of a cluster
    predictor.engine, predictor.fingerprint = engine, "f"
    predictor.chat = {"chat_template": None, "chat_template_kwargs": None}
    asked = {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    rows = [
        {"id": 0, "prompt": "Once", "params": json.dumps(asked)},
        {"id": 1, "prompt": "Once", "params": json.dumps({"max_tokens": 3})},
    ]
    first, second = predictor(pyarrow.Table.from_pylist(rows)).to_pylist()
    expected = engine.generate(["Once"], {**asked, "seed": 0})[0].to_json()
    for name in ("logprobs", "prompt_logprobs"):
        assert json.loads(first[name]) == expected[name]
        assert second[name] is None
    wrong = {
        "column text, which": {"text": "mine"},
        "row 7 has n = 2": {"params": {"n": 2}},
        "row 7 has params that cannot be used: temperature": {"params": {"temperature": -1}},
        "row 7 has params that are not JSON": {"params": "{"},
        "row 7 has messages that are not JSON": {"prompt": None, "messages": "hello"},
        "row 7 has params of type list; give a record": {"params": [1]},
    }
    for words, changes in wrong.items():
        table = pyarrow.Table.from_pylist([{"id": 7, "prompt": "Once", **changes}])
        with pytest.raises(JaxspecError, match=words):
            predictor(table)


def test_an_actor_that_holds_every_cpu_says_so(driver):
    dataset = ray.data.from_items([{"id": 0, "prompt": "Once"}])
    found = dataset.map_batches(
        Predictor, fn_constructor_args=(None,), num_cpus=4, batch_format="pyarrow", concurrency=1
    )
    with pytest.raises(Exception, match="was given all 4 CPUs of the cluster"):
        found.take_all()
    with pytest.raises(SettingError, match="4 replicas were asked for"):
        predict(dataset, None, num_replicas=4, batch_size=1)


def test_an_interrupted_driver_keeps_its_rows_and_ends_its_actors(cluster, prompts, tmp_path):
    out = tmp_path / "out"
    process = start(cluster, "--prompts", prompts, "--output", out)
    until(lambda: list(out.glob("*.parquet")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("interrupted\n")
    assert 0 < len(read(out)) < NUM_PROMPTS
    until(lambda: not actors())


def test_replicas_of_ray_serve_answer_as_the_engine(driver, engine):
    """As the page of many machines deploys them."""
    serve = pytest.importorskip("ray.serve", exc_type=ImportError)
    openai = pytest.importorskip("openai")
    page = (Path(__file__).parents[2] / "docs/scale-out.md").read_text()
    [block] = [
        block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "serve.run" in block
    ]
    for given, used in {
        '"MODEL"': '"demo-target"',
        '"DRAFT"': '"demo-draft"',
        "batch_size=8": "batch_size=2, max_length=256",
        '"num_gpus": 1': '"num_cpus": 0.5',
    }.items():
        assert given in block
        block = block.replace(given, used)
    try:
        exec(block, {"__name__": "page"})
        client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")
        prompts = [line.prompt[:30] for line in sample_prompts()[:12]]
        expected = engine.generate(prompts, SamplingParams(max_tokens=12))

        def ask(prompt):
            return client.completions.create(
                model="demo-target", prompt=prompt, max_tokens=12, temperature=0
            )

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, prompts))
        assert [one.choices[0].text for one in found] == [done.text for done in expected]
        assert len({one.system_fingerprint for one in found}) == 1
    finally:
        serve.shutdown()
