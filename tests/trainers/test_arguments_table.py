"""The TrainingArguments table against the installed transformers, the config models and the docs page."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from trainers.config import DistillationConfig, GRPOConfig, SFTConfig
from trainers.training_arguments import FIXED, PYTHON_ONLY, REFUSED, SUPPORTED, docs_page

ROOT = Path(__file__).parents[2]
INSTALLED = {field.name for field in fields(TrainingArguments)}


def test_every_installed_field_is_in_exactly_one_table():
    assert not set(SUPPORTED) & set(REFUSED)
    assert set(SUPPORTED) | set(REFUSED) == INSTALLED


def test_supported_means_a_config_field_or_the_python_class():
    for config in (GRPOConfig, DistillationConfig, SFTConfig):
        assert set(SUPPORTED) - set(PYTHON_ONLY) == set(config.model_fields) & INSTALLED
    assert set(PYTHON_ONLY) <= set(SUPPORTED)
    assert set(FIXED) <= set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED | PYTHON_ONLY))
def test_a_run_config_refuses_the_name_with_its_reason(name):
    reason = {**PYTHON_ONLY, **REFUSED}[name]
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        GRPOConfig.model_validate({"model": "m", "dataset": {"path": "d"}, name: 1})
    assert reason in str(caught.value)


def test_the_docs_page_is_the_table():
    assert (ROOT / "docs" / "training_arguments.md").read_text() == docs_page()


def test_the_table_imports_no_transformers():
    code = "import sys, trainers.training_arguments; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
