"""The model store: whatever the user names becomes one local folder in Hugging Face's layout."""

from radixfleet.models.errors import ModelError
from radixfleet.models.store import SMALL_MODEL_NAME, resolve

__all__ = ["SMALL_MODEL_NAME", "ModelError", "resolve"]
