"""Models on the Hugging Face hub: fetched by name, pushed as one commit."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from coda_prompt.errors import HubProblem
from coda_prompt.learner.store import CARD, CONFIG, FORMAT, MODEL, Model, packed


def fetched(
    name: str, revision: str | None, endpoint: str | None, cache: Path | None = None
) -> Path:
    """The folder of a model of the hub, in the hub's cache."""
    try:
        file = hf_hub_download(name, MODEL, revision=revision, endpoint=endpoint, cache_dir=cache)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HubProblem(name, "fetched", error) from error
    return Path(file).parent


def pushed(
    name: str,
    model: Model,
    card: str,
    *,
    private: bool,
    token: str | None,
    endpoint: str | None,
) -> str:
    """One commit with all files; the address of the commit."""
    description = json.dumps({**model.description, "format": FORMAT}, indent=2, ensure_ascii=False)
    files = {MODEL: packed(model), CONFIG: description.encode() + b"\n", CARD: card.encode()}
    api = HfApi(token=token, endpoint=endpoint)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.create_commit(
            name,
            [CommitOperationAdd(path, data) for path, data in files.items()],
            commit_message=f"{len(model.description['classes'])} classes",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise HubProblem(name, "pushed", error) from error
    return str(commit.commit_url)
