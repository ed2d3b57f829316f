"""Places to write to that are no folders (`s3://...`)."""

from __future__ import annotations

from typing import Any

from fsspec.core import url_to_fs

from coda_prompt.errors import BadOption, MissingData


class RemotePath:
    """The files behind an address; what fails there is told in words."""

    def __init__(self, address: str, command: str) -> None:
        self.address = address
        try:
            self._files, root = url_to_fs(address)
        except (ValueError, ImportError) as error:
            problem = f"'{address}' is no address that can be used here ({error})"
            raise BadOption(command, "out", problem) from error
        self.root: str = root.rstrip("/")

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of fsspec's file systems answers; only a missing file is an OSError."""
        try:
            return getattr(self._files, what)(*arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # networks fail in many ways
            remedy = "Check the address, your credentials and the network; then run this again."
            raise MissingData(self.address, f"it cannot be used ({error})", remedy) from error
