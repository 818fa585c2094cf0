"""Programs for the sandbox that find examples of a package's functions, in two modes.

"record" runs the package's own tests and keeps calls of module functions whose
arguments are plain values. "replay" makes such calls and says what each gives. Both
read an order as JSON on stdin and answer on stdout. What they say is only shown, never
judged by.
"""

import ast
import importlib
import json
import os
import sys

MAX_CHARS = 100
MAX_CALLS = 40


def plain(value: object) -> str:
    """The value as a literal, "" where it has none that is short and exact."""
    try:
        text = repr(value)
        if len(text) <= MAX_CHARS and text == repr(ast.literal_eval(text)):
            return text
    except Exception:
        pass
    return ""


class Recorder:
    """A profile function: the first plain calls of each function of `paths`."""

    def __init__(self, paths: list[str]):
        self.paths = {os.path.abspath(path): path for path in paths}
        self.calls: dict[str, list[str]] = {}

    def __call__(self, frame: object, event: str, _: object) -> None:
        code = frame.f_code
        path = self.paths.get(code.co_filename)
        if event != "call" or path is None or "." in code.co_qualname:
            return
        found = self.calls.setdefault(f"{path}:{code.co_name}", [])
        call = arguments_of(frame)
        if call and call not in found and len(found) < MAX_CALLS:
            found.append(call)


def arguments_of(frame: object) -> str:
    """ "1, key='a'" for plain arguments; "" for others, and for a call of none."""
    code = frame.f_code
    num_positional = code.co_argcount
    names = code.co_varnames[: num_positional + code.co_kwonlyargcount]
    if code.co_flags & 12:  # *args or **kwargs
        return ""
    texts = [plain(frame.f_locals[name]) for name in names]
    if not all(texts):
        return ""
    keywords = zip(names[num_positional:], texts[num_positional:], strict=True)
    named = [f"{name}={text}" for name, text in keywords]
    return ", ".join([*texts[:num_positional], *named])


def record(order: dict) -> dict:
    sys.path.insert(0, os.path.abspath(order["archive"]))
    import pytest

    recorder = Recorder(order["sources"])
    options = ["-c", os.devnull, "--rootdir", os.getcwd(), "--import-mode=append", "-q"]
    sys.setprofile(recorder)
    pytest.main([*options, "-p", "no:cacheprovider", "--noconftest", *order["paths"]])
    sys.setprofile(None)
    return recorder.calls


def replay(order: dict) -> list[str]:
    """What each call gives: a literal, "raises NAME", or "" for neither."""
    module = importlib.import_module(order["module"])
    given = []
    for call in order["calls"]:
        try:
            given.append(plain(eval(f"{order['function']}({call})", vars(module))))
        except Exception as error:
            given.append(f"raises {type(error).__name__}")
    return given


def main() -> None:
    order = json.load(sys.stdin)
    private = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path += [os.path.join(os.getcwd(), root) for root in order["roots"]]
    found = record(order) if order["mode"] == "record" else replay(order)
    with os.fdopen(private, "w") as file:
        json.dump(found, file)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
