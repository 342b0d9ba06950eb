"""What Loopwright adds to a vLLM server. Runs inside vLLM's interpreter, so it imports nothing of Loopwright's.

The folder above this package is put on the server's PYTHONPATH; vLLM finds `register` through the entry point in the
`dist-info` folder beside it, in every process it starts.
"""

BACKEND = "loopwright_shared_storage"


def register() -> None:
    """Entry point of `vllm.general_plugins`; called once in each process, harmless when called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "loopwright_vllm.shared_storage", "SharedStorageEngine")
