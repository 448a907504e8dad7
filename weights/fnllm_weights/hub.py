"""Finding a checkpoint: a local folder, or a Hugging Face hub id fetched into the local cache (effect)."""

import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Weights in other formats (original/, consolidated.safetensors, .bin) lie beside the ones read here.
PATTERNS = ("*.json", "model*.safetensors", "*.jinja", "*.txt", "*.model")


def config_folder(path_or_hub_id: str | Path, revision: str | None) -> Path:
    """A folder that holds at least config.json, so that an unsupported model is refused before its weights come."""
    if (folder := _local(path_or_hub_id)) is not None:
        return folder
    hub = _hub(path_or_hub_id)
    try:
        return Path(hub.hf_hub_download(str(path_or_hub_id), "config.json", revision=revision)).parent
    except Exception as error:  # the library has a dozen of its own: not found, gated, offline, ...
        raise ValueError(f"{path_or_hub_id!r} is not a folder, and cannot be fetched as a hub id: {error}") from error


def weights_folder(path_or_hub_id: str | Path, revision: str | None) -> Path:
    """The folder with everything, fetched if it is a hub id."""
    if (folder := _local(path_or_hub_id)) is not None:
        return folder
    hub = _hub(path_or_hub_id)
    try:
        return Path(hub.snapshot_download(str(path_or_hub_id), revision=revision, allow_patterns=list(PATTERNS)))
    except Exception as error:
        raise ValueError(f"the files of {path_or_hub_id!r} cannot be fetched from the hub: {error}") from error


def _local(path_or_hub_id: str | Path) -> Path | None:
    if not isinstance(path_or_hub_id, str | Path):
        raise TypeError(f"path_or_hub_id must be a folder or a hub id, found {type(path_or_hub_id).__name__}")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file; give the folder that holds config.json and the weights")
    if isinstance(path_or_hub_id, Path) or not HUB_ID.fullmatch(path_or_hub_id):
        raise ValueError(f"there is no folder {path}, and this is not a hub id such as Qwen/Qwen3-0.6B")
    return None


def _hub(path_or_hub_id: str | Path):
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"there is no folder {str(path_or_hub_id)!r}; to fetch it as a hub id install huggingface_hub: "
            "pip install 'fnllm[hub]'"
        ) from error
    return huggingface_hub
