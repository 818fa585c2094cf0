"""The command line: flags -> config -> one call.

Each command is a dataclass of flags, whose docstring is its help. What a user can get
wrong is one sentence on stderr and exit status 2; nothing is written then. Heavy
modules are imported where a command runs, so that --help answers at once.
"""

from gagar_mini.cli.dispatch import COMMANDS, main, sentence, split_command

__all__ = ["COMMANDS", "main", "sentence", "split_command"]
