"""Where the shipped reasoning model is; without torch, so that command lines start fast."""

from importlib.resources import files


def shipped_model_path() -> str:
    """Its Hugging Face directory, from which `load_model` loads it."""
    return str(files("kvtier_worker.cot").joinpath("weights"))
