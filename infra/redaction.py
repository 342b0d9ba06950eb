"""Secrets out of texts that are stored or shown: causes, tracebacks, log records, and all that a process of ours prints.

    known values    what a variable of the environment with a secret's name holds (`HF_TOKEN`, `…_PASSWORD`, `…_API_KEY`), the
                    password inside a variable's URL (`LOOPWRIGHT_REGISTRY_URL`), and what `protect_references` found
    key-like texts  `hf_…`, `sk-…`, `AKIA…`, `Bearer …`, `password=…`, passwords and signatures inside URLs

Both become `(removed)`. A safety net, not a way to handle secrets: configs name them by reference and nothing prints them.
A secret that is shorter than 6 characters, or was encoded or cut, is not recognised.

Standard library only: `infra.supervisor` uses it for what its command prints, isolated from installed packages.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from infra.tracking_params import REMOVED, is_secret

MIN_CHARS = 6  # what is shorter would be found inside ordinary words
MIN_LINE_CHARS = 16  # of a secret of several lines

_NAME = re.compile(r"AUTH_STRING$|(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
# Variables that say where a secret is, or how long it lasts; their values are no secrets.
_ABOUT = re.compile(r"(_FILE|_PATH|_DIR|_URI|_URL|_ENV|_NAME|_EXPIRATION|_TTL|_PARALLELISM)$", re.IGNORECASE)
_ADDRESSES = {"LOOPWRIGHT_NOTIFY_URL"}  # whoever knows a webhook's address may post to it
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")
_NAMED = (
    r"api[_-]?key|secret[_-]?access[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|auth[_-]?string|password|passwd"
)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    # From `://` on: a scheme before it would be looked for from every character of a long word.
    (re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{REMOVED}@"),
    (
        re.compile(
            r"([?&](?:token|access_token|auth|key|api_?key|sig|signature|x-amz-(?:signature|credential|security-token))=)"
            rf"(?!{re.escape(REMOVED)})[^&\s'\"<>#]+",
            re.IGNORECASE,
        ),
        rf"\1{REMOVED}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+(?=\S*[0-9=])[A-Za-z0-9+/=._~\-]{8,}"), rf"\1 {REMOVED}"),
    (
        re.compile(
            r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
            r"|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abprs]-[\w\-]{10,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]{5,})"
        ),
        REMOVED,
    ),
    (
        re.compile(rf"((?:{_NAMED})['\"]?\s*[=:]\s*['\"]?)(?!{re.escape(REMOVED)}|\$\{{)[^\s'\",;&)}}\]]{{4,}}", re.IGNORECASE),
        rf"\1{REMOVED}",
    ),
)
_protected: set[str] = set()


def protect_references(fields: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Count as secrets, in this process from now on, what the references below `kwargs` and `env` of a config stand for,
    whatever the variable is called."""
    _protected.update(_referenced(fields, environ, inside=False))


def _referenced(value: Any, environ: Mapping[str, str], inside: bool) -> Iterable[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _referenced(item, environ, inside or name in ("env", "kwargs", "model_init_kwargs"))
    elif isinstance(value, list):
        for item in value:
            yield from _referenced(item, environ, inside)
    elif inside and isinstance(value, str):
        yield from filter(None, (environ.get(name) for name in _REFERENCE.findall(value)))


def known_secrets(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Values that are secrets. Of one that has several lines (a private key) each line is one, as logs show it."""
    found = set(_protected)
    for name, value in environ.items():
        value = value.strip()  # a mounted secret ends in a newline, what prints it does not
        if len(value) < MIN_CHARS:
            continue
        if name in _ADDRESSES or ((_NAME.search(name) or is_secret(name)) and not _ABOUT.search(name)):
            found.add(value)
            found.update(value.split(":", 1)[1:] if name.upper().endswith("AUTH_STRING") else ())
        if "://" in value and "@" in value:
            found.update(_passwords(value))
    found.update([line for value in found for line in value.splitlines() if len(line) >= MIN_LINE_CHARS])
    return {value for value in found if len(value) >= MIN_CHARS}


def _passwords(url: str) -> Iterable[str]:
    try:
        password = urlsplit(url).password
    except ValueError:
        return ()
    return {password, unquote(password)} if password else ()


class Redactor:
    """`redact` for many texts: what is secret is looked up once, here.

    Args:
        others: further values that are secrets.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, others: Iterable[str] = ()) -> None:
        self.known = sorted({*known_secrets(environ), *others}, key=len, reverse=True)  # none is left as a part of another

    def __call__(self, text: str) -> str:
        for value in self.known:
            if value in text:
                text = text.replace(value, REMOVED)
        for pattern, replacement in _SHAPES:
            text = pattern.sub(replacement, text)
        return text


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` with secrets replaced."""
    return Redactor(environ)(text)


def redact_logs() -> None:
    """Every record that is logged in this process from now on is redacted, its traceback too, whatever handler writes it."""
    before = logging.getLogRecordFactory()
    if getattr(before, "redacts", False):
        return

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # a wrong format string is reported by the handler, as always
            return record
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, ()
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (clean := redact(text)) != text:
                record.exc_info, record.exc_text = None, clean
        return record

    factory.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(factory)
