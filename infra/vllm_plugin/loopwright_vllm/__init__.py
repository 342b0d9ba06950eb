"""What Loopwright adds to a vLLM server. Runs inside vLLM's interpreter, so it imports nothing of Loopwright's.

The folder above this package is put on the server's PYTHONPATH; vLLM finds `register` through the entry point in the
`dist-info` folder beside it, in every process it starts. Of itself it makes prompt log-probabilities follow the request's
temperature (prompt_temperature.py). Three of the server's arguments switch the rest on:

    --weight-transfer-config '{"backend": "loopwright"}'            engine.py: how weights arrive
    --worker-extension-cls loopwright_vllm.worker.WorkerExtension   worker.py: what a worker says of itself, one-call updates
    --middleware loopwright_vllm.auth.KeyMiddleware                 auth.py, guard.py: key; control.py: POST /loopwright/sync

Adapters are loaded by one copy (adapters.py). Requests may ask that their tokens leave the engine in batches (holding.py), and
their log-probabilities come as arrays (arrays.py, installed by the middleware).
"""

BACKEND = "loopwright"


def register() -> None:
    """Entry point of `vllm.general_plugins`; called once in each process, harmless when called again."""
    from multiprocessing import parent_process

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from loopwright_vllm import holding

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "loopwright_vllm.engine", "LoopwrightEngine")
    holding.install()
    if parent_process() is not None:  # not the front end, which runs no model
        from loopwright_vllm import adapters, prompt_temperature

        adapters.install()
        prompt_temperature.install()
