"""What goes wrong with models, in words for the user."""


class ModelError(Exception):
    """The model cannot be found, fetched or converted; the text says why and what would help."""
