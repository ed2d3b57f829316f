"""Download models from the Hugging Face hub and upload them as one commit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from coda_prompt.errors import HubError, counted
from coda_prompt.learner.folder import MODEL, Version, copies
from coda_prompt.learner.model import LearnedModel
from coda_prompt.storage.files import read_regular


def download_model(
    name: str, revision: str | None, token: str | None, endpoint: str | None
) -> Version:
    """Download a model to the hub's cache.

    Raises:
        HubError: It does not exist or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        file = hf_hub_download(name, MODEL, revision=revision, token=token, endpoint=endpoint)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HubError(name, "downloaded", error) from error
    return Version(0, data=read_regular(Path(file).resolve()))  # the cache has a link to it


def upload_model(
    name: str, model: LearnedModel, *, private: bool, token: str | None, endpoint: str | None
) -> str:
    """Upload a model, its description and its card in one commit; return the commit's URL.

    Raises:
        HubError: The hub refused it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if model.backbone.path is not None:  # local paths are not written to the card
        name_only = {"path": None, "name": Path(model.backbone.name).name}
        model = dataclasses.replace(model, backbone=model.backbone.model_copy(update=name_only))
    description = model.description()
    content = Version.of(description, model.arrays()).content
    files = {MODEL: content, **copies(description)}
    api = HfApi(token=token, endpoint=endpoint)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.create_commit(
            name,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=counted(len(model.classes), "class"),
        )
    except Exception as error:  # without a network, the error of whichever HTTP library is used
        raise HubError(name, "uploaded", error) from error
    return str(commit.commit_url)
