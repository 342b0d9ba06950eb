"""What of a text is taken for a secret, and what is not."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from infra import redaction
from infra.redaction import known_secrets, protect_references, redact, redact_logs


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "_protected", set())
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


ENVIRONMENT = {
    "HF_TOKEN": "token-of-mine\n",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtn/FEMI",
    "MLFLOW_TRACKING_PASSWORD": "pass word",
    "PREFECT_API_AUTH_STRING": "admin:lengthy-secret",
    "LOOPWRIGHT_REGISTRY_URL": "postgresql+psycopg://me:dbpass%2F1@db/loopwright",
    "TOKENIZERS_PARALLELISM": "false-value",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/token-file",
    "PATH": "/usr/bin:/bin",
    "SHORT_PASSWORD": "abc",
}


def test_values_of_secret_variables_are_known_by_the_variables_name() -> None:
    assert set(known_secrets(ENVIRONMENT)) == {
        "token-of-mine", "wJalrXUtn/FEMI", "pass word", "admin:lengthy-secret", "lengthy-secret", "dbpass%2F1", "dbpass/1",
    }  # fmt: skip
    text = "401 for token-of-mine; me:dbpass/1; lengthy-secret; pass word; /usr/bin; abc; false-value; /var/token-file"
    assert redact(text, ENVIRONMENT) == (
        "401 for (removed); me:(removed); (removed); (removed); /usr/bin; abc; false-value; /var/token-file"
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot open https://me:pw@host/x?y=1", "cannot open https://(removed)@host/x?y=1"),
        ("headers {'Authorization': 'Bearer abcdefgh.12345'}", "headers {'Authorization': 'Bearer (removed)'}"),
        ("Basic YWRtaW46c2VjcmV0", "Basic (removed)"),
        ("invalid key sk-proj-abcdefghijklmnop1234", "invalid key (removed)"),
        ("hf_abcdefghijklmnopqrst is not valid", "(removed) is not valid"),
        ("AKIAIOSFODNN7EXAMPLE", "(removed)"),
        ("call(password='hunter22', n=3)", "call(password='(removed)', n=3)"),
        ('{"api_key": "abc123", "step": 4}', '{"api_key": "(removed)", "step": 4}'),
    ],
)
def test_key_like_texts(text: str, clean: str) -> None:
    assert redact(text, {}) == clean
    assert redact(clean, {}) == clean, "a second pass changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "token_budget=4096, pad_token='<pad>', eos_token: </s>",
        "set VLLM_API_KEY before the run; ${oc.env:API_KEY}",
        "kwargs: {api_key: ${oc.env:JUDGE}}",
        "http://127.0.0.1:4200/api and sqlite:////home/me/registry.db",
        "Basic arithmetic fails at step 3",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text, {}) == text


def test_references_in_keyword_arguments_are_secrets_whatever_they_are_called() -> None:
    config = {
        "model": "${oc.env:MODEL_FOLDER}",
        "reward_funcs": [{"path": "a:b", "kwargs": {"judge": "${oc.env:JUDGE,none}", "n": 3}}],
        "servers": {"student": {"env": {"X": "x-${oc.env:INNER}"}}},
    }
    protect_references(config, {"MODEL_FOLDER": "/models/tiny", "JUDGE": "judge-secret", "INNER": "inner-secret"})
    assert redact("/models/tiny judge-secret inner-secret", {}) == "/models/tiny (removed) (removed)"


def test_log_records_are_redacted_with_their_traceback_and_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-mine")
    redact_logs()
    redact_logs()
    stream = io.StringIO()
    logger = logging.Logger("of-its-own")
    logger.addHandler(logging.StreamHandler(stream))
    logger.warning("refused: %s", "token-of-mine")
    try:
        raise ValueError("token-of-mine is expired")
    except ValueError:
        logger.exception("failed after %d tries", 3)
    text = stream.getvalue()
    assert "token-of-mine" not in text
    assert text.splitlines()[:2] == ["refused: (removed)", "failed after 3 tries"]
    assert text.splitlines()[-1] == "ValueError: (removed) is expired"
    assert logger.makeRecord("n", 30, "f", 1, "%s", ("plain",), None).args == ("plain",)
