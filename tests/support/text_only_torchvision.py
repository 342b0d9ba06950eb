"""What transformers' image code imports of torchvision, for a server that is sent text alone.

vLLM imports that code before it serves a model that also sees, also with `--language-model-only`. The torchvision that its CPU
package asks for is built for another torch than the CPU's (`operator torchvision::nms does not exist`), so tests have none.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "torchvision/__init__.py": '__version__ = "0.28.0"\n',
    "torchvision/io.py": "class ImageReadMode: ...\n\n\ndecode_image = None\n",
    "torchvision/transforms/__init__.py": (
        "from enum import Enum\n\n"
        'NAMES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")\n'
        'InterpolationMode = Enum("InterpolationMode", {name.upper().replace("-", "_"): name for name in NAMES})\n'
    ),
    "torchvision/transforms/functional.py": "pil_to_tensor = None\n",
    "torchvision/transforms/v2/__init__.py": "from torchvision.transforms import InterpolationMode\n",
    "torchvision/transforms/v2/functional.py": "from torchvision.transforms import InterpolationMode\n",
    "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
}


def write_torchvision(folder: Path) -> str:
    """The folder, to put on a server's PYTHONPATH."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)
