"""Whether the Hugging Face Hub answers."""

from __future__ import annotations

import threading

MAX_WAIT = 2.5
"""Seconds to wait for the hub's first answer."""


def request_metadata(url: str) -> None:
    """Request a file's metadata once: without a network, the hub's packages retry for 25 seconds.

    In a thread, because the name lookup has no timeout.

    Raises:
        HfHubHTTPError: The hub answers, and refuses.
        Exception: It cannot be reached; the type depends on the HTTP library.
    """
    from huggingface_hub import constants, get_hf_file_metadata

    outcome: list[Exception | None] = []
    configured = constants.HF_HUB_ETAG_TIMEOUT
    timeout = MAX_WAIT if configured == constants.DEFAULT_ETAG_TIMEOUT else configured

    def request() -> None:
        try:
            get_hf_file_metadata(url, timeout=timeout)
        except Exception as error:  # noqa: BLE001 (raised below)
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"no answer within {timeout:g} s; HF_HUB_ETAG_TIMEOUT sets this time")
    if outcome[0] is not None:
        raise outcome[0]
