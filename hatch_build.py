"""Package metadata that depends on the repository: links, and the README as PyPI shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryMetadata(MetadataHookInterface):
    """Set `urls` and `readme`; the repository is known from the variables of GitHub Actions."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        urls = {"Paper": "https://arxiv.org/abs/2211.13218"}
        if repository := os.environ.get("GITHUB_REPOSITORY"):  # OWNER/NAME
            commit = os.environ.get("GITHUB_SHA", "HEAD")
            text = absolute_links(text, repository, commit)
            source = f"https://github.com/{repository}"
            urls["Source"] = source
            urls["Issues"] = f"{source}/issues"
            urls["Changelog"] = f"{source}/blob/main/CHANGELOG.md"
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def absolute_links(markdown: str, repository: str, commit: str) -> str:
    """Make links to files of the repository absolute: PyPI shows neither files nor pictures."""

    def absolute(link: re.Match[str]) -> str:
        host = "https://raw.githubusercontent.com" if link["picture"] else "https://github.com"
        folder = commit if link["picture"] else f"blob/{commit}"
        return f"{link['text']}({host}/{repository}/{folder}/{link['path']})"

    return re.sub(
        r"(?P<text>(?P<picture>!?)\[[^]]*\])\((?!\w+:|#)(?P<path>[^)]+)\)", absolute, markdown
    )
