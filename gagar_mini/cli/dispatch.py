"""From words to one call: find the command, read its flags, run it."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import tyro

from gagar_mini.cli import evaluate, judge, machine, models, runs, tasks
from gagar_mini.types import SandboxUnavailable


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass: its docstring is the help, its fields are the flags."""

    def execute(self) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 done, 1 a run of an experiment failed, 2 bad
    input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    families = {name.split()[0] for name in COMMANDS if " " in name} - {*COMMANDS}
    if {*words} <= {"-h", "--help", "help", *families}:
        print(overview())
        return 0
    try:
        name, rest = split_command(words)
        parse(name, COMMANDS[name], rest).execute()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; a flush at exit would only complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, FloatingPointError, SandboxUnavailable) as error:
        print(f"gagar-mini: {sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gagar-mini: interrupted", file=sys.stderr)
        return 130
    return 0


def overview() -> str:
    """The commands, one line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        f"  {name:<{width}}{command.__doc__.splitlines()[0]}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: gagar-mini COMMAND [flags]   (gagar-mini COMMAND --help says more)",
            "",
            "Train small code agents with binary GRPO or GAGAR, and look inside.",
            "Start with `gagar-mini doctor`: it says what this machine can run.",
            "",
            *lines,
        ]
    )


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The longest prefix of `words` that names a command, and what follows."""
    for length in (3, 2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    family = [name for name in COMMANDS if name.split()[0] == words[0]]
    choices = ", ".join(family or COMMANDS)
    raise ValueError(
        f"there is no command {' '.join(words[:2])!r}: use one of {choices}"
    )


def parse(name: str, command: type[Command], words: Sequence[str]) -> Command:
    """The flags of a command; a slip is a ValueError, without tyro's frame."""
    default = None
    if command is runs.Train:
        words = [runs.expand_shorthand(word) for word in words]
        default = runs.Train(config=runs.preset_of(words))
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                command,
                args=list(words),
                default=default,
                prog=f"gagar-mini {name}",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(unframed(box.getvalue())) from None


def unframed(box: str) -> str:
    """The message of tyro's framed error, and the nearest flag where it names one."""
    frame = "".join(map(chr, range(0x2500, 0x2580))) + " "
    lines = [line.strip(frame) for line in box.splitlines()[1:]]
    # without Unicode the frame is drawn with - and |
    lines = [line.strip("| ") for line in lines if not re.fullmatch("[-+]{3,}", line)]
    message = " ".join(lines[: lines.index("")] if "" in lines else lines)
    near = [line for line in lines if line.startswith("--")]
    if message.startswith("Unrecognized") and near:
        return f"{message}: did you mean {near[0]}?"
    return message


def sentence(error: Exception) -> str:
    """The error on one line; an OSError says what and where, without its number."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return " ".join((where + error.strerror).split())
    return " ".join(str(error).split()) or type(error).__name__


COMMANDS: dict[str, type[Command]] = {
    "doctor": machine.Doctor,
    "tasks list": tasks.List,
    "tasks show": tasks.Show,
    "tasks build": tasks.Build,
    "tasks build repo": tasks.BuildRepo,
    "tasks build functions": tasks.BuildFunctions,
    "tasks fetch": tasks.Fetch,
    "tasks export": tasks.Export,
    "tasks import": tasks.Import,
    "models fetch": models.ModelsFetch,
    "sft policy": models.SftPolicy,
    "sft chat": models.SftChat,
    "sft grader": models.SftGrader,
    "sft grader-data": models.SftGraderData,
    "train": runs.Train,
    "eval": evaluate.Eval,
    "eval grader": evaluate.EvalGrader,
    "eval attacks": evaluate.EvalAttacks,
    "eval hacks": evaluate.EvalHacks,
    "verify": judge.Verify,
    "grade": judge.Grade,
    "compare": runs.Compare,
    "experiment": runs.ExperimentFlags,
    "export": runs.Export,
    "bench": machine.Bench,
}
"""Commands by name, in the order in which a reader meets them."""
