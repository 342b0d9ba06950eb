"""boto3's client, and what its errors mean to a run."""

from __future__ import annotations

import os
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
)

from infra.errors import Damaged, NotStored, StorageError, StorageRefused
from infra.storage.base import Options

_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
)
_REFUSED = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "ExpiredToken", "ExpiredTokenException", "InvalidToken",
    "TokenRefreshRequired", "AuthorizationHeaderMalformed", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401",
    "Unauthorized", "PermanentRedirect", "301", "RequestTimeTooSkewed",
}  # fmt: skip
CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or a role) where the run is started"


def make_client(options: Options) -> Any:
    """A client of its own session, which looks for credentials now.

    Raises:
        StorageRefused: the profile, region or address that the environment names cannot be used.
    """
    core = botocore.session.get_session()
    try:
        own = core.get_scoped_config().get("s3") or {}
        endpoint = options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        addressing = (
            {} if not endpoint or (isinstance(own, dict) and own.get("addressing_style")) else {"addressing_style": "path"}
        )
        return boto3.Session(botocore_session=core).client(
            "s3",
            endpoint_url=options.endpoint_url,
            # Others than Amazon ask for a region in the signature only.
            region_name=core.get_config_variable("region") or "us-east-1",
            config=Config(
                connect_timeout=min(options.timeout_s, 10.0),
                read_timeout=options.timeout_s,
                retries={"mode": "adaptive", "total_max_attempts": options.attempts},
                max_pool_connections=4 + 2 * options.parallel,
                # Newer checksums are refused by some services; every part carries its MD5.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3=addressing or None,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageRefused(f"no S3 client can be made: {error}; {CREDENTIALS}") from error


def translated(error: ClientError | BotoCoreError, operation: str, bucket: str, key: str, endpoint: str) -> StorageError:
    """The error of ours that one of boto3's stands for."""
    where = f"s3://{bucket}/{key}" if key else f"s3://{bucket}"
    if isinstance(error, _NO_CREDENTIALS):
        return StorageRefused(f"{where}: no credentials ({_line(error)}): {CREDENTIALS}")
    if isinstance(error, NoRegionError):
        return StorageRefused(f"{where}: no region: set AWS_REGION")
    if not isinstance(error, ClientError):
        return StorageError(f"{where}: {_line(error)}")
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    if code == "NoSuchBucket":
        return StorageRefused(f"there is no bucket {bucket} at {endpoint}: create it, or name another in storage.uri")
    if code in ("NoSuchKey", "404", "NotFound", "NoSuchUpload"):
        return NotStored(f"{where} is not there ({code})")
    if code == "InvalidRange":
        return Damaged(f"{where} is shorter than its manifest says")
    if code in _REFUSED:
        return StorageRefused(
            f"{where}: {endpoint} refuses {operation} ({code}: {message}): {CREDENTIALS}, with leave for this"
        )
    return StorageError(f"{where}: {operation} failed: {code} {message}".rstrip())


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
