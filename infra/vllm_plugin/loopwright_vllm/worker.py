"""Methods added to vLLM's worker class (`--worker-extension-cls`), called through /collective_rpc and control.py."""


class WorkerExtension:
    def loopwright_state(self) -> dict:
        """See `LoopwrightEngine.state`."""
        return self.weight_transfer_engine.state()

    def loopwright_update(self, update_info: dict) -> dict:
        """A whole update in one call; a session that a dead trainer left open is closed first."""
        self._weight_update_active = False
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()
        return self.weight_transfer_engine.state()
