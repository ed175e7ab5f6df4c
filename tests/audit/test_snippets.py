"""Scripts that write outputs files: short, valid Python, and the Hugging Face one is run."""

import ast
import runpy

import pytest
import tiny

from jaxspec.audit.external import audit_outputs
from jaxspec.audit.outputs import read_outputs
from jaxspec.audit.snippets import NAMES, snippet
from jaxspec.load.models import load_model


@pytest.mark.parametrize("name", NAMES)
def test_snippets_are_short_and_valid(name):
    text = snippet(name)
    assert len(text.strip().split("\n")) <= 10
    assert "MODEL" in text
    assert all(field in text for field in ('"engine"', '"dtype"', "prompt_token_ids", "token_ids"))
    ast.parse(text)


def test_the_hugging_face_snippet_writes_what_the_auditor_reads(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.EOS,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().hf.save_pretrained(tmp_path / "model")
    script = tmp_path / "dump.py"
    script.write_text(snippet("hf").replace("MODEL", str(tmp_path / "model")))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))

    target = load_model(tmp_path / "model")
    file = read_outputs(tmp_path / "outputs.jsonl", target)
    assert (file.engine, file.version, file.dtype) == ("hf", transformers.__version__, "bfloat16")
    audit = audit_outputs(target, file)
    assert audit.holds, audit.to_json()["divergences"]
    assert audit.judged[0].num_tokens == len(file.outputs[0].token_ids) > 1
