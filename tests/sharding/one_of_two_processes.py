"""One of two processes under `jax.distributed`, each with two virtual devices.

It prints, as JSON, what came of a model, a drafter and engines of its own.

    python one_of_two_processes.py INDEX COORDINATOR DIRECTORY
"""

import json
import os
import pathlib
import sys
import traceback

import jax

import jaxspec
from jaxspec import Engine, SamplingParams, load_drafter, load_model, save_model

PROMPT, SAMPLING = [3, 4, 5], SamplingParams(max_tokens=6)


def refusal(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except jaxspec.errors.SettingError as error:
        return str(error)
    return "accepted"


def main(index: int, coordinator: str, directory: pathlib.Path) -> dict:
    jax.distributed.initialize(coordinator, num_processes=2, process_id=index)
    found = {"num_devices": [jax.device_count(), jax.local_device_count()]}
    converted = load_model(directory / "hf")  # one of them converts it, the other waits
    save_model(converted, directory / f"saved-{index}")
    model = load_model(directory / f"saved-{index}")
    [home] = {leaf.sharding for leaf in jax.tree.leaves(model.params)}
    found["is_local"] = home.device_set == {jax.local_devices()[0]}
    [completion] = Engine(model, batch_size=1, max_length=32).generate([PROMPT], SAMPLING)
    found["tokens"] = list(completion.token_ids)

    devices = jax.local_devices()
    local = jax.make_mesh((2,), ("data",), devices=devices)
    engine = Engine(model, batch_size=2, max_length=32, mesh=local)
    found["on_mesh"] = [list(each.token_ids) for each in engine.generate([PROMPT] * 2, SAMPLING)]

    target = load_model("demo-target")
    drafter = load_drafter("demo-flexdraft", target)
    homes = {leaf.sharding for leaf in jax.tree.leaves(drafter.params)}
    found["is_drafter_local"] = homes == {home}

    every = jax.make_mesh((4,), ("data",), devices=jax.devices())
    found["engine_on_all"] = refusal(Engine, model, batch_size=4, max_length=32, mesh=every)
    spread = jax.sharding.NamedSharding(every, jax.sharding.PartitionSpec())
    found["model_on_all"] = refusal(load_model, directory / "saved-0", sharding=spread)
    others = jax.devices()[2 * (1 - index)]
    single = jax.sharding.SingleDeviceSharding(others)
    found["model_on_other"] = refusal(load_model, directory / "hf", sharding=single)
    jax.distributed.shutdown()  # waits for the other process
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not waiting for the other process
