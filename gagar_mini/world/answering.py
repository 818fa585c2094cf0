"""The program that answers the judge's calls, run inside the sandbox next to the
candidate.

Standard library only, and trusted with nothing: it shares a process with the candidate,
which may do with it what it likes. It never sees an expected value. Calls come as JSON
on stdin; each answer is one JSON line on what was stdout, which the candidate's own
output does not reach. Values travel with their exact builtin type, in a form where
equal text means equal.
"""

import importlib
import json
import os
import signal
import sys

CALL_CPU_S = 0.5
"""Processor seconds of one call; the program ends at the first call that takes
longer."""


def encode(value):
    """`value` as nested lists and strings, tagged with its exact type.

    Two values have one form if and only if they are equal and of equal types throughout
    (True is not 1, 1 is not 1.0, a list is no tuple); the order of a dict or set is no
    part of it, all NaN are one, and 0.0 is -0.0. TypeError for any type that is not
    builtin, subclasses included, so an object that claims to equal everything has no
    form.
    """
    kind = type(value)
    if value is None:
        return "none"
    if kind in (bool, int):
        return f"{kind.__name__} {value:x}"  # decimal digits are limited, these are not
    if kind is float:
        return "float " + (value + 0.0).hex()
    if kind is str:
        return "str " + value
    if kind is bytes:
        return "bytes " + value.hex()
    if kind in (list, tuple):
        return [kind.__name__, *map(encode, value)]
    if kind in (set, frozenset):
        return [kind.__name__, *sorted(map(encode, value), key=repr)]
    if kind is dict:
        pairs = [[encode(key), encode(item)] for key, item in value.items()]
        return ["dict", *sorted(pairs, key=repr)]
    raise TypeError(f"a result of type {kind.__name__} is not a plain value")


def decode(form):
    """The value of which `encode` makes `form`."""
    if isinstance(form, list):
        kind, *items = form
        if kind == "dict":
            return {decode(key): decode(item) for key, item in items}
        makers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return makers[kind](map(decode, items))
    kind, _, text = form.partition(" ")
    makers = {"none": lambda _: None, "bool": lambda text: text == "1"}
    makers |= {"int": lambda text: int(text, 16), "float": float.fromhex}
    makers |= {"str": str, "bytes": bytes.fromhex}
    return makers[kind](text)


def find_function(path, name):
    """The function of a file in the working directory; "Class.method" is followed."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def answer(call):
    """["ok", form of the result] or ["error", what was raised]."""
    try:
        function = find_function(call["path"], call["function"])
        return ["ok", encode(function(*decode(call["arguments"])))]
    except BaseException as error:
        return ["error", type(error).__name__]


def main():
    calls = json.load(sys.stdin)
    private = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGPROF, lambda *_: os._exit(124))
    for number, call in enumerate(calls):
        signal.setitimer(signal.ITIMER_PROF, CALL_CPU_S)
        line = json.dumps([number, *answer(call)])
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(private, line.encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
