"""A model by its id on the Hugging Face hub: its ``config.json`` and how many parameters its files state.

Never weights, never code of a repository. `huggingface_hub` keeps the config in its own cache, so that a model that
was asked for once works without a network, and honours ``HF_HUB_OFFLINE``, ``HF_ENDPOINT`` and ``HF_TOKEN``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TIMEOUT_S = 10.0
"""How long the hub may take to answer one request (`huggingface_hub`'s own default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What the hub says about a model."""

    config: dict[str, Any]
    stated_params: int | None
    """Elements of all its safetensors files, by their metadata; None where the hub has none or does not answer."""


def looks_like_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/model``."""
    return HUB_ID.fullmatch(name) is not None


def from_hub(name: str, unknown: InputError) -> HubModel:
    """Config and parameter count of a hub model that the catalog does not have.

    `unknown` is what the catalog said; it leads every refusal, since most unknown ids are misspelt.
    """
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError(
            f'{unknown} Ids that only the hub has need huggingface_hub; type: pip install "tunecast[calibrate]"'
        ) from error
    from tunecast.model.config_file import read_config

    reachable, stated = stated_params(name, unknown)
    try:
        path = huggingface_hub.hf_hub_download(
            name, "config.json", etag_timeout=TIMEOUT_S, local_files_only=not reachable
        )
    except network_errors() as error:
        raise refusal(name, unknown, error) from error
    return HubModel(config=read_config(Path(path)), stated_params=stated)


def stated_params(name: str, unknown: InputError) -> tuple[bool, int | None]:
    """Whether the hub answers, and the elements of the model's safetensors files by the metadata that it keeps.

    One request without retries, so that a machine without a network is told at once.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(name, timeout=TIMEOUT_S, expand=["safetensors"])
    except errors.HfHubHTTPError as error:
        raise refusal(name, unknown, error) from error
    except network_errors():
        return False, None
    stated = getattr(info, "safetensors", None)
    return True, None if stated is None else int(stated.total)


def network_errors() -> tuple[type[Exception], ...]:
    """What a request may raise: OSError, and base errors of the HTTP library under `huggingface_hub`, whichever."""
    from huggingface_hub import errors

    return (*errors.HfHubHTTPError.__bases__, OSError)


def refusal(name: str, unknown: InputError, error: Exception) -> InputError:
    """One sentence for what the hub, or the lack of a network, answered."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"{name} is gated on the hub: accept its terms there and type `hf auth login`, or give its config.json."
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return InputError(f"{name} has no config.json on the hub; give one as a local file.")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return InputError(f"{unknown} The hub has no public model {name} either; a private one needs `hf auth login`.")
    if status is not None:
        return InputError(f"{unknown} The hub answered {status} when asked for {name}; try again later.")
    return InputError(f"{unknown} The hub, which may have it, cannot be reached from here.")


def count_note(name: str, counted: int, stated: int | None) -> tuple[str, ...]:
    """A note where the files of a model hold another number of parameters than its config makes."""
    if stated is None or stated == counted:
        return ()
    note = (
        f"{name}'s config makes {counted:,} parameters, its safetensors files state {stated:,}: copies of tied "
        "weights, a vision part or packed weights would explain it."
    )
    return (note,)
