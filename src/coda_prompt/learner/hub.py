"""Download models from the Hugging Face hub and upload them as one commit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from coda_prompt.errors import HubError, counted
from coda_prompt.learner.store import MODEL, Model, copies, encode_model, read_file


def download_model(
    name: str, revision: str | None, token: str | None, endpoint: str | None
) -> Model:
    """Download a model to the hub's cache and read it.

    Raises:
        HubError: It does not exist or the hub cannot be reached.
    """
    try:
        file = hf_hub_download(name, MODEL, revision=revision, token=token, endpoint=endpoint)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HubError(name, "downloaded", error) from error
    return read_file(Path(file).resolve())  # the cache has a link to it


def upload_model(
    name: str, model: Model, *, private: bool, token: str | None, endpoint: str | None
) -> str:
    """Upload a model, its description and its card in one commit; return the commit's URL.

    Raises:
        HubError: The hub refused it or cannot be reached.
    """
    backbone = model.description.backbone
    if backbone.path is not None:  # a folder of this machine is nobody else's business
        name_only = {"path": None, "name": Path(backbone.name).name}
        backbone = backbone.model_copy(update=name_only)
    described = model.description.model_copy(update={"backbone": backbone})
    model = dataclasses.replace(model, description=described)
    files = {MODEL: encode_model(model), **copies(described)}
    api = HfApi(token=token, endpoint=endpoint)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.create_commit(
            name,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=counted(len(model.description.classes), "class"),
        )
    except Exception as error:  # without a network, the error of whichever HTTP library is used
        raise HubError(name, "uploaded", error) from error
    return str(commit.commit_url)
