"""`jaxspec bench kv`: passes with KV in int8 beside the same with the model's own dtype."""

import io

import pytest
from rich.console import Console

from jaxspec.errors import SettingError
from jaxspec.lab.bench.kv import KvBench


def test_both_dtypes_are_timed_in_turns():
    console = Console(file=io.StringIO(), width=120)
    bench = KvBench(
        kernels="xla",
        dtypes=("float32",),
        batch_sizes=(2,),
        windows=(1,),
        contexts=(40,),
        repeats=3,
    )
    [found] = bench.run(console)["results"]
    assert (found["dtype"], found["kernels"], found["batch_size"]) == ("float32", "xla", 2)
    assert found["own_ms"] > 0 < found["int8_ms"]
    assert len(found["ratios"]) == 3
    assert min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])
    assert "int8 ms" in console.file.getvalue()


def test_no_context_is_refused():
    with pytest.raises(SettingError, match="--contexts nothing was given"):
        KvBench(contexts=()).check()
