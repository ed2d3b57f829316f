"""Models on the Hugging Face hub: fetched by name, pushed as one commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from coda_prompt.errors import HubError
from coda_prompt.learner.card import card_of
from coda_prompt.learner.store import CARD, CONFIG, MODEL, Model, config_text, encode_model


def fetched(name: str, revision: str | None, token: str | None, endpoint: str | None) -> Path:
    """The folder of a model of the hub, in the hub's cache."""
    try:
        file = hf_hub_download(name, MODEL, revision=revision, token=token, endpoint=endpoint)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HubError(name, "fetched", error) from error
    return Path(file).parent


def pushed(
    name: str, model: Model, *, private: bool, token: str | None, endpoint: str | None
) -> str:
    """One commit with all files; the address of the commit."""
    files = {
        MODEL: encode_model(model),
        CONFIG: config_text(model).encode(),
        CARD: card_of(model.description).encode(),
    }
    api = HfApi(token=token, endpoint=endpoint)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.create_commit(
            name,
            [CommitOperationAdd(path, data) for path, data in files.items()],
            commit_message=f"{len(model.description.classes)} classes",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise HubError(name, "pushed", error) from error
    return str(commit.commit_url)
