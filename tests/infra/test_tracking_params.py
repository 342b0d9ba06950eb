"""What of a config becomes params, and what never leaves the process."""

from __future__ import annotations

import pytest

from infra.tracking_params import MAX_PARAM_CHARS, flatten, is_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apikey", "VLLM_API_KEY", "hub_token", "token", "HF_TOKEN", "password", "db_password", "client_secret"),
        *(
            "AWS_SECRET_ACCESS_KEY",
            "aws_access_key_id",
            "Authorization",
            "credentials",
            "secret",
            "ssh_private_key",
            "x-api-key",
        ),
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("token_budget", "max_tokens", "num_tokens", "eos_token", "pad_token", "tokenizer", "keyword", "key_metric", "monkey"),
        *("secret_santa_rows", "authors", "passes"),
    ],
)
def test_names_that_only_look_secret(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_removed_at_any_depth_and_inside_urls() -> None:
    config = {
        "servers": [{"env": {"HF_TOKEN": "abc", "OMP_NUM_THREADS": "2"}}],
        "registry": "postgresql://me:pw@db:5432/loop",
        "hub_token": None,
    }
    assert without_secrets(config) == {
        "servers": [{"env": {"HF_TOKEN": "(removed)", "OMP_NUM_THREADS": "2"}}],
        "registry": "postgresql://(removed)@db:5432/loop",
        "hub_token": None,
    }
    assert config["servers"][0]["env"]["HF_TOKEN"] == "abc"  # a copy


def test_params_are_flat_strings_with_names_mlflow_takes() -> None:
    assert flatten({"a": {"b": 1, "c": None, "d": {}}, "list": [1, "x"], "flag": True, "odd@name": "v", "text": "t"}) == {
        "a.b": "1",
        "a.c": "null",
        "a.d": "{}",
        "list": '[1, "x"]',
        "flag": "true",
        "odd_name": "v",
        "text": "t",
    }


def test_a_long_value_is_left_to_the_artefact() -> None:
    assert flatten({"prompt": "x" * MAX_PARAM_CHARS})["prompt"] == "x" * MAX_PARAM_CHARS
    long = flatten({"prompt": "x" * 501})["prompt"]
    assert long.startswith("(501 characters, sha256 ") and long.endswith(": see config.yaml)")
    assert long != flatten({"prompt": "y" * 501})["prompt"]
