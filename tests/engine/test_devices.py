"""An engine on one of several devices says so."""

import os
import subprocess
import sys

CODE = """
import logging
logging.basicConfig(level=logging.WARNING)
import jaxspec
config = jaxspec.ModelConfig(
    family="llama", vocab_size=16, width=8, feed_forward_width=8, num_layers=1, num_query_heads=1,
    num_kv_heads=1, head_size=8, max_length=64, norm_epsilon=1e-6,
    rope=jaxspec.RopeConfig(theta=1e4, rotary_size=8),
)
engine = jaxspec.Engine(jaxspec.random_model(config), batch_size=1, max_length=128)
print(len(engine.generate([[1, 2]])[0].token_ids))
"""


def test_an_engine_on_one_of_several_devices_says_so():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "16", done.stderr
    assert "using 1 of 4 CPUs" in done.stderr
