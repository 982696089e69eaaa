"""The connection to S3: a botocore client from the environment, and its errors as one sentence each.

Endpoint, region, credentials, profile, proxies and certificates are found as in every program that uses boto3
(AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_PROFILE, AWS_ACCESS_KEY_ID, files below
`~/.aws`, roles of containers and hosts, AWS_CA_BUNDLE). Headrace adds HEADRACE_S3_SSE (AES256 or aws:kms),
HEADRACE_S3_SSE_KMS_KEY_ID and HEADRACE_S3_ADDRESSING_STYLE (path, virtual or auto). No credential is ever part of a
store's URL, of a message or of an object.
"""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import botocore.exceptions as aws
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.handlers import add_expect_header

from stages.artifacts.manifest import check_path
from stages.artifacts.patience import patiently
from stages.artifacts.store import Damaged, FullStore, NotInStore, ReadOnlyStore, StoreError

ATTEMPTS = 8  # with adaptive waiting in between: half a minute of SlowDown, seconds of other failures
CONNECT_SECONDS = 10
READ_SECONDS = 60
CONNECTIONS = 32
LISTED = "HeadraceListed"
_LISTED_FIELDS = [(name, re.compile(rf"<{name}>([^<]*)</{name}>")) for name in ("Key", "Size", "ETag", "LastModified")]
FAULTS = (aws.ClientError, aws.BotoCoreError)  # what an operation of the client raises

_LOADER = botocore.loaders.create_loader()  # the description of S3 takes 0.15 s to read: once a process

_ACTIONS = {"read": "s3:GetObject", "write": "s3:PutObject", "delete": "s3:DeleteObject", "list": "s3:ListBucket"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden", "UnauthorizedAccess"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidClientTokenId"}
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired"}
_SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_BUSY = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "503", "429"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "StorageFull", "NoSpaceLeftOnDevice", "507"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_DIGEST = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}


def parse_url(url: str) -> tuple[str, str]:
    """The bucket, and the prefix with a "/" at its end (or ""), of a URL `s3://bucket/prefix`.

    Raises:
        StoreError: it is not of that form.
    """
    rest = url.split("://", 1)[1]
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise StoreError(
            "an s3:// store takes no user, password or host in its URL; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
            "and AWS_ENDPOINT_URL_S3, and give s3://bucket/prefix"
        )
    if "?" in rest or "#" in rest:
        raise StoreError(
            f"{url.split('?')[0]}: a store takes no options in its URL; set AWS_ENDPOINT_URL_S3 and AWS_REGION"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        raise StoreError(f"{url}: {bucket!r} is not the name of a bucket; give s3://bucket or s3://bucket/prefix")
    prefix = prefix.strip("/")
    try:
        return bucket, check_path(prefix) + "/" if prefix else ""
    except ValueError as error:
        raise StoreError(f"{url}: the prefix cannot be used: {error}") from None


def make_session() -> botocore.session.Session:
    """What clients are made of: it has found the credentials, and gets new ones before they expire."""
    session = botocore.session.Session()
    session.register_component("data_loader", _LOADER)
    return session


def make_client(session: botocore.session.Session | None = None, *, patient: bool = True) -> Any:
    """A client for S3. `patient=False` is for a first look: it gives up after two attempts.

    Raises:
        StoreError: the endpoint, the profile or another setting of the environment cannot be used.
    """
    style = os.environ.get("HEADRACE_S3_ADDRESSING_STYLE", "").strip()
    if style not in ("", "path", "virtual", "auto"):
        raise StoreError(f"HEADRACE_S3_ADDRESSING_STYLE is {style!r}; set it to path, virtual or auto")
    s3: dict[str, Any] = {"payload_signing_enabled": False}  # the signed SHA-256 of what is stored vouches for it
    if style:
        s3["addressing_style"] = style
    retries: dict[str, Any] = {"mode": os.environ.get("AWS_RETRY_MODE") or "adaptive"}
    attempts = os.environ.get("AWS_MAX_ATTEMPTS", "").strip() or str(ATTEMPTS)
    if not attempts.isdigit() or int(attempts) < 1:
        raise StoreError(f"AWS_MAX_ATTEMPTS is {attempts!r}; set it to a number from 1 on, or leave it out")
    retries["total_max_attempts"] = int(attempts) if patient else 2
    try:
        session = session or make_session()
        region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
        config = Config(
            region_name=region,
            connect_timeout=CONNECT_SECONDS if patient else 5,
            read_timeout=READ_SECONDS if patient else 15,
            max_pool_connections=CONNECTIONS,
            retries=retries,
            s3=s3,
            tcp_keepalive=True,
            # Headrace gives and checks SHA-256 itself; other checksums by default would trip older servers.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = session.create_client("s3", config=config)
    except aws.ProfileNotFound as error:
        raise StoreError(f"S3: {error}; set AWS_PROFILE to one of `aws configure list-profiles`") from None
    except (ValueError, aws.BotoCoreError) as error:
        raise StoreError(f"S3 cannot be set up: {error}; check AWS_ENDPOINT_URL_S3 and the files in ~/.aws") from None
    for operation in ("PutObject", "UploadPart"):
        # Waiting for "100 Continue" costs a round trip for each object, and servers that never say it a second.
        client.meta.events.unregister(f"before-call.s3.{operation}", add_expect_header)
    if patient:
        _wait_where_runs_do(client)
    # With the first "*" it comes before botocore's own look for errors, which parses the whole listing once more.
    client.meta.events.register("before-parse.*.ListObjectsV2", _take_listing)
    return client


def _wait_where_runs_do(client: Any) -> None:
    """Let calls wait for a server that is away, after botocore's own attempts, in processes that do (`patience`)."""
    call = client._make_api_call

    def patient_call(operation: str, parameters: dict[str, Any]) -> Any:
        body = parameters.get("Body")
        tried = False

        def again() -> None:
            nonlocal tried
            tried = True
            if body is not None and hasattr(body, "seek"):
                body.seek(0)

        try:
            return patiently(lambda: call(operation, parameters), is_away, f"{endpoint(client)} (S3)", again)
        except aws.ClientError as error:
            if tried:  # for `may_have_happened`
                metadata = error.response.setdefault("ResponseMetadata", {})
                metadata["RetryAttempts"] = metadata.get("RetryAttempts", 0) + 1
            raise

    client._make_api_call = patient_call


def is_away(error: Exception) -> bool:
    """Whether an error says that the server cannot be reached or is overloaded, which time may mend."""
    if isinstance(error, aws.ClientError):
        return status(error) in (429, 500, 502, 503, 504) or error_code(error) in _BUSY
    if isinstance(getattr(error, "kwargs", {}).get("error"), StoreError):  # of the file that was being sent
        return False
    away = (aws.EndpointConnectionError, aws.ConnectTimeoutError, aws.ProxyConnectionError, aws.HTTPClientError)
    return isinstance(error, away) and not isinstance(error, aws.SSLError)


def _take_listing(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Read the objects of a listing: botocore's own reading takes most of the time of a listing, and many times this.

    What is read is cut out of the answer, so that botocore reads the rest.
    """
    body = response_dict["body"]
    begin, end = body.find(b"<Contents>"), body.rfind(b"</Contents>") + len(b"</Contents>")
    if response_dict["status_code"] != 200 or begin < 0 or end < begin:
        return
    encoded = b"<EncodingType>url</EncodingType>" in body
    contents = body[begin:end].decode()
    if encoded:  # then no key has a quote, and those around ETags, which servers write in several ways, may go
        contents = contents.replace("&#34;", "").replace("&quot;", "")
    fields = [pattern.findall(contents) for _, pattern in _LISTED_FIELDS]
    count = contents.count("<Contents>")
    if any(len(values) != count for values in fields) or "&" in contents:  # a server that says it otherwise
        items = ElementTree.fromstring(f"<l>{contents}</l>")
        fields = [[item.findtext(name, "") for item in items] for name, _ in _LISTED_FIELDS]
    names, sizes, etags, dates = fields
    if encoded:
        names = [unquote_plus(name) if "%" in name or "+" in name else name for name in names]
    response_dict["body"] = body[:begin] + body[end:]
    customized_response_dict[LISTED] = names, list(map(int, sizes)), [etag.strip('"') for etag in etags], dates


def listed_objects(answer: dict[str, Any]) -> tuple[list[str], list[int], list[str], list[Any]]:
    """Names, sizes, ETags and times of change (for `time_of`) of the objects of one page of a listing, in its order."""
    if LISTED in answer:
        names, sizes, etags, times = answer[LISTED]
        return names, sizes, etags, times
    items = answer.get("Contents", [])
    etags = [str(item.get("ETag", "")).strip('"') for item in items]
    times = [item["LastModified"] for item in items]
    return [item["Key"] for item in items], [int(item["Size"]) for item in items], etags, times


def time_of(said: str | datetime) -> float:
    """The time of change of an object (unix seconds), as a listing or a look at one object states it."""
    return (datetime.fromisoformat(said) if isinstance(said, str) else said).timestamp()


def encryption() -> dict[str, str]:
    """Parameters of a put that ask for server-side encryption, as the environment says.

    Raises:
        StoreError: the setting is none that S3 knows.
    """
    wanted = os.environ.get("HEADRACE_S3_SSE", "").strip()
    key = os.environ.get("HEADRACE_S3_SSE_KMS_KEY_ID", "").strip()
    if wanted not in ("", "AES256", "aws:kms", "aws:kms:dsse"):
        raise StoreError(f"HEADRACE_S3_SSE is {wanted!r}; set it to AES256 or aws:kms, or leave it out")
    if key and not wanted.startswith("aws:kms"):
        raise StoreError("HEADRACE_S3_SSE_KMS_KEY_ID is set; set HEADRACE_S3_SSE=aws:kms too")
    return ({"ServerSideEncryption": wanted} if wanted else {}) | ({"SSEKMSKeyId": key} if key else {})


def endpoint(client: Any) -> str:
    """Where the client connects to, without what may be secret."""
    parts = urlsplit(str(client.meta.endpoint_url))
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def error_code(error: BaseException) -> str:
    """The code of an answer of S3 ("NoSuchKey"), "" for an error of another sort."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, aws.ClientError) else ""


def status(error: BaseException) -> int:
    """The HTTP status of an answer of S3, 0 for an error of another sort."""
    if not isinstance(error, aws.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def may_have_happened(error: BaseException) -> bool:
    """Whether an earlier attempt of a refused request may have been carried out though its answer was lost."""
    if not isinstance(error, aws.ClientError):
        return True
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0


def explain(error: BaseException, store: str, bucket: str, where: str, verb: str, what: str) -> StoreError:
    """One sentence for what went wrong.

    Args:
        error: what an operation of the client raised.
        store, bucket: the store, such as "store s3://bucket/prefix", and its bucket.
        where: the endpoint.
        verb, what: what was tried ("read", "write", "delete", "list") on which key.
    """
    if isinstance(inner := getattr(error, "kwargs", {}).get("error"), StoreError):  # of the file that was being sent
        return inner
    if isinstance(error, aws.ClientError):
        return _explain_answer(error, store, bucket, where, verb, what)
    if isinstance(error, aws.NoCredentialsError):
        return ReadOnlyStore(
            f"{store}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if isinstance(error, aws.PartialCredentialsError | aws.CredentialRetrievalError | aws.TokenRetrievalError):
        return ReadOnlyStore(f"{store}: the credentials cannot be used ({error}); check AWS_PROFILE and ~/.aws")
    if isinstance(error, aws.SSLError):
        return StoreError(
            f"{store}: {where} is not trusted ({_first(error)}); check the address, or set AWS_CA_BUNDLE "
            "to its certificate"
        )
    if isinstance(error, aws.ProxyConnectionError):
        return StoreError(f"{store}: the proxy cannot be reached; check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, aws.EndpointConnectionError | aws.ConnectTimeoutError):
        return StoreError(f"{store}: {where} cannot be reached; check the network and AWS_ENDPOINT_URL_S3")
    if isinstance(error, aws.FlexibleChecksumError):
        return Damaged(f"{what} in {store} is damaged: its bytes do not have the checksum that was stored with it")
    if isinstance(error, aws.HTTPClientError | aws.ReadTimeoutError | aws.IncompleteReadError):
        return StoreError(
            f"{store}: the connection to {where} failed while trying to {verb} {what}, several times; try again later"
        )
    return StoreError(f"{store}: cannot {verb} {what}: {_first(error)}")


def _explain_answer(error: aws.ClientError, store: str, bucket: str, where: str, verb: str, what: str) -> StoreError:
    code, said = error_code(error), str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if code == "NoSuchBucket":
        return StoreError(f"{store}: {where} has no bucket {bucket}; create it, or give another one")
    if code == "NoSuchKey" or (code == "404" and verb == "read"):
        return NotInStore(f"{store} has no {what}")
    if code in _WRONG_KEY:
        return ReadOnlyStore(
            f"{store}: {where} does not accept the credentials ({code}); check AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_PROFILE"
        )
    if code in _EXPIRED:
        return ReadOnlyStore(
            f"{store}: the credentials have expired ({code}); get new ones, such as by `aws sso login`"
        )
    if code in _SKEWED:
        return StoreError(f"{store}: {_skew(headers)}; set the clock of this machine, such as by turning on NTP")
    if code in _DENIED:
        action = _ACTIONS.get(verb, verb)
        return ReadOnlyStore(
            f"{store}: no permission to {verb} {what or bucket} ({code}); allow these credentials {action} on the "
            "bucket (docs/s3.md has a policy)"
        )
    if code in _REGION:
        region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
        said = (
            f"it is in region {region}; set AWS_REGION={region}" if region else "set AWS_REGION to the bucket's region"
        )
        return StoreError(f"{store}: bucket {bucket} is not in the region that was asked; {said}")
    if code in _BUSY:
        return StoreError(f"{store}: {where} is overloaded ({code}), also after several attempts; try again later")
    if code in _FULL:
        return FullStore(
            f"{store} is full ({code}); free some space, raise the quota, or give another place with --store"
        )
    if code in _DIGEST:
        return Damaged(f"{what} reached {store} with other bytes ({code}): it changed while it was stored")
    return StoreError(f"{store}: cannot {verb} {what}: {said or 'S3 gave no reason'} ({code})")


def _skew(headers: dict[str, str]) -> str:
    there = server_time(headers)
    if there is None:
        return "the clock of this machine differs too much from the server's"
    off = time.time() - there
    return f"the clock of this machine is {abs(off):,.0f} s {'ahead of' if off > 0 else 'behind'} the server's"


def server_time(headers: dict[str, str]) -> float | None:
    """The time that an answer states (unix seconds, to one second), None where it states none."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
