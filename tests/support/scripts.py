"""Users' scripts as tests run them: written to a folder and started with the plain interpreter, without Prefect or MLflow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# The quick start, but for its imports, the data (there is no hub) and a reward defined in the script itself. No guard.
QUICKSTART = """
# train_async_grpo.py
from datasets import Dataset
from trainers import AsyncGRPOTrainer

def digits_reward(completions, target, **kwargs):
    return [sum(c.isdigit() for c in completion[0]["content"]) / (t + len(completion[0]["content"]))
            for completion, t in zip(completions, target)]

dataset = Dataset.from_list([{"prompt": f"{i}+{i}=", "target": 1 + i % 2} for i in range(12)])

trainer = AsyncGRPOTrainer(
    model="MODEL",
    reward_funcs=digits_reward,
    train_dataset=dataset,
)
trainer.train()
with open("after", "a") as file:
    file.write(f"{trainer.state.global_step}\\n")
"""

# The curriculum of the manual: a dataclass with a threshold, a loop that reads it, a trainer that names the loop.
CURRICULUM = """
from dataclasses import dataclass
from functools import partial
import sys

import numpy as np

from trainers import AsyncGRPOConfig, AsyncGRPOTrainer, AsyncRolloutLoop


@dataclass
class CurriculumConfig(AsyncGRPOConfig):
    pass_rate_cap: float = 0.9


class CurriculumRolloutLoop(AsyncRolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return self.pass_rates.get(row_index, 0.0) < self.config.pass_rate_cap

    async def setup(self):
        self.pass_rates = {}

    def compute_advantages(self, group):
        scored = group.rewards[~np.isnan(group.rewards)]
        if len(scored):
            self.pass_rates[group.row_index] = float(np.mean(scored > 0))
            with open("pass_rates", "a") as file:
                file.write(f"{group.row_index} {self.pass_rates[group.row_index]} {self.config.pass_rate_cap}\\n")
        return super().compute_advantages(group)


class CurriculumTrainer(AsyncGRPOTrainer):
    loop_cls = CurriculumRolloutLoop


class Length:
    def __init__(self, scale):
        self.scale = scale

    async def __call__(self, completion_ids, **kwargs):
        return [self.scale * len(ids) for ids in completion_ids]


def contains(completions, character, **kwargs):
    return [float(character in completion[0]["content"]) for completion in completions]


args = CurriculumConfig(
    output_dir="out",
    vllm_server_base_url=sys.argv[2],
    max_steps=int(sys.argv[3]),
    num_generations=4,
    max_completion_length=24,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    pass_rate_cap=2.0,
    reward_weights=[0.5, 1.0],
)
trainer = CurriculumTrainer(
    model=sys.argv[1],
    reward_funcs=[Length(0.1), partial(contains, character="1")],
    args=args,
    train_dataset=[{"prompt": [{"role": "user", "content": f"{i}*{i}="}]} for i in range(200)],
)
output = trainer.train(resume_from_checkpoint=len(sys.argv) > 4)
trainer.save_model("final")
if trainer.is_world_process_zero():
    print("OUTPUT", output.global_step, output.training_loss, sorted(output.metrics))
"""


def quick_start(text: str, model: Path, **servers: Any) -> str:
    """`text` as it is written, with the folder of a model. Only where `servers` (fields of its arguments) are not at their
    default addresses, because other programs of this machine have those ports, is the script told of them."""
    import trainers

    (name,) = re.findall(r"from trainers import (\w+)", text)
    usual = getattr(trainers, name).args_class()
    text = text.replace("MODEL", str(model))
    if all(getattr(usual, field) == value for field, value in servers.items()):
        return text
    folder = f"{model.name}-{name.removesuffix('Trainer')}"  # the default one
    told = f"args={name}.args_class(output_dir={folder!r}, **{servers!r})"
    before, data, after = text.partition("    train_dataset=dataset,\n")
    assert data, text
    return f"{before}{data}    {told},\n{after}"


def block_flow_packages(folder: Path) -> Path:
    """A folder for PYTHONPATH in which importing Prefect, MLflow or SQLAlchemy fails, as where they are not installed."""
    for name in ("prefect", "mlflow", "sqlalchemy"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} must not be imported by a training script')\n")
    return folder


def run_script(
    text: str, folder: Path, *arguments: str, key: str = "", launcher: tuple[str, ...] = (), timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Write `text` to `folder/train_async_grpo.py` and run it there with the server's `key`; output is captured.

    `launcher` goes between the interpreter and the script: `("-m", "torch.distributed.run", …)`.
    """
    script = folder / "train_async_grpo.py"
    script.write_text(text)
    blocked = folder / "blocked"
    if not blocked.exists():
        block_flow_packages(blocked)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOOPWRIGHT_", "MLFLOW_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(blocked), str(ROOT)]), "VLLM_API_KEY": key, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script), *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a launcher's ranks as well
            raise AssertionError(f"the script did not end within {timeout_s} s:\n{process.communicate()[1]}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
