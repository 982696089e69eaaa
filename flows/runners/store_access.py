"""What a stage that runs elsewhere needs to reach the store: variables of the environment, and folders.

Only what is named here leaves the flow's environment, and HEADRACE_STAGE_ENV may name more of it (a reward function's
key, a tracker's address). Credentials travel to the engine in the request that makes the container; they are in no
spec, record, log or command line.

Keys that the environment holds are passed on as they are. Those of `~/.aws` are read and passed on. A role of the host
or the container is found anew from where the stage runs. Keys that have to be renewed from this machine (single
sign-on, an assumed role) would expire under a long stage, so they are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flows.runners.base import RunnerError
from stages.artifacts import FolderStore, Store

EXTRA = "HEADRACE_STAGE_ENV"

_ALWAYS = ("HEADRACE_LEASE_SECONDS", "HEADRACE_STORE_WAIT", "TZ")
_TRACKERS = {
    "tensorboard": ("TENSORBOARD_LOGGING_DIR",),
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE"),
    "mlflow": (
        *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN"),
        *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    ),
}
_S3 = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_EC2_METADATA_DISABLED", "AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_USE_DUALSTACK_ENDPOINT", "AWS_USE_FIPS_ENDPOINT"),
    *("HEADRACE_S3_SSE", "HEADRACE_S3_SSE_KMS_KEY_ID", "HEADRACE_S3_ADDRESSING_STYLE", "HEADRACE_CACHE_SIZE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
_FROM_FILES = ("shared-credentials-file", "config-file")
_FOUND_THERE = ("iam-role", "container-role", "assume-role-with-web-identity")


def stage_environment(
    store: Store, trackers: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that a stage is given.

    Args:
        trackers: those that the step reports to.
        environment: the flow's own.

    Raises:
        RunnerError: HEADRACE_STAGE_ENV names a variable that is not set, or the credentials cannot be handed on.
    """
    ours = os.environ if environment is None else environment
    names = [*_ALWAYS, *(name for tracker in trackers for name in _TRACKERS.get(tracker, ()))]
    if store.remote:
        names += _S3
    given = {name: ours[name] for name in names if ours.get(name)}
    for name in ours.get(EXTRA, "").replace(",", " ").split():
        if name not in ours:
            raise RunnerError(f"{EXTRA} names {name}, which is not set; set it, or take it off the list")
        given[name] = ours[name]
    if store.remote and "AWS_ACCESS_KEY_ID" not in given:
        given |= _credentials()
    return given


def _credentials() -> dict[str, str]:
    """Keys and region of the user's files, as variables; {} where the stage finds its own."""
    import botocore.exceptions
    import botocore.session

    try:
        session = botocore.session.Session()
        found = session.get_credentials()
        region = session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:
        raise RunnerError(f"the credentials of the store: {error}") from None
    given = {"AWS_DEFAULT_REGION": region} if region else {}
    if found is None or found.method in _FOUND_THERE:
        return given
    if found.method not in _FROM_FILES:
        raise RunnerError(
            f"the store's credentials ({found.method}) would expire in a container; export lasting ones as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the host a role"
        )
    frozen = found.get_frozen_credentials()
    given |= {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
    return given | ({"AWS_SESSION_TOKEN": frozen.token} if frozen.token else {})


def certificates(environment: Mapping[str, str] | None = None) -> Path | None:
    """The file of certificates that this machine trusts the store by, where one is named (AWS_CA_BUNDLE)."""
    named = (os.environ if environment is None else environment).get("AWS_CA_BUNDLE")
    return Path(named).absolute() if named and Path(named).is_file() else None


def container_user(store: Store, asked: str | None, uid: int, gid: int, step: str) -> str | None:
    """Who a stage container runs as: "uid:gid", or None for the user of the image.

    A folder store has to be written as the flow writes it, so there it is the flow's own user; but never root, unless
    HEADRACE_DOCKER_USER asks for it.

    Raises:
        RunnerError: that would be root.
    """
    if asked:
        return asked
    if not isinstance(store, FolderStore):
        return None
    if uid == 0:
        raise RunnerError(
            f"step {step}: stage containers do not run as root, and root's folder store {store.root} can be written by "
            "no other user. Run headrace as another user, use a bucket, or allow it with HEADRACE_DOCKER_USER=0:0"
        )
    return f"{uid}:{gid}"
