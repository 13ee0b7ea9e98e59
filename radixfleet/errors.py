"""What ends a command with a message instead of a traceback."""


class CommandError(Exception):
    """The command cannot go on; the text is for the user."""
