"""How long does an exported policy take for one observation? `python -m benchmarks.latency RUN`.

Unit: milliseconds of a call on one core, as the median and the 99th percentile of all calls, and the calls per second
that the 99th percentile allows. The formats take turns: each round calls each of them once.
Not measured: loading, the first calls, and everything else that a robot does.

Before timing, each export is compared with the run's checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks.machine import in_turns, load_tensorflow


def main(run: Annotated[Path, tyro.conf.Positional], rounds: int = 2000, trust_modules: bool = False) -> None:
    """Prints the latency of the policy of a run in each format.

    Args:
        run: Run folder.
        rounds: Number of calls that count.
        trust_modules: Whether to import the module of a custom network, which executes its code.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load_tensorflow()  # with one thread
    with tempfile.TemporaryDirectory() as folder:
        calls = _calls(run, trust_modules, folder)
        seconds = in_turns(calls, rounds, warm_up=100)
    print("| format | median, ms | 99th percentile, ms | calls per second |\n|---|---:|---:|---:|")
    for format, taken in seconds.items():
        median, slow = np.percentile(taken, [50, 99])
        print(f"| {format} | {1e3 * median:.3f} | {1e3 * slow:.3f} | {1 / slow:,.0f} |")


def _calls(path: Path, trust_modules: bool, folder: str) -> dict[str, Callable[[], Any]]:
    """Returns a function for each format that passes one observation to the policy and reads its action."""
    import onnxruntime
    import tensorflow as tf
    from ai_edge_litert.interpreter import Interpreter

    import ppo

    run = ppo.Run.open(path, trust_modules=trust_modules)
    files = {format: str(ppo.export(run, folder, format)[0]) for format in ("onnx", "tflite", "savedmodel")}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(files["onnx"], options)
    lite = Interpreter(files["tflite"], num_threads=1).get_signature_runner("serving_default")
    served = tf.saved_model.load(files["savedmodel"]).signatures["serving_default"]
    rng = np.random.default_rng(0)
    observation = {
        name: rng.standard_normal([1, *spec.shape[1:]]).astype(spec.dtype.as_numpy_dtype)
        for name, spec in served.structured_input_signature[1].items()
    }
    return {
        "onnx": lambda: session.run(None, observation),
        "tflite": lambda: lite(**observation),
        "savedmodel": lambda: [
            action.numpy()
            for action in served(**{name: tf.constant(values) for name, values in observation.items()}).values()
        ],
    }


if __name__ == "__main__":
    tyro.cli(main)
