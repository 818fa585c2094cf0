"""Any tokenizer's chat template as token pieces, and one parser for tool calls.

The template is taken apart once, by rendering short chats whose words are marks: what
it writes before a system prompt, between an answer and the next tool result, and so on.
A context is then put together from these pieces: the prompt once, afterwards sampled
ids as they were sampled and, for each answer, what the template writes behind an
assistant's turn. Nothing is rendered twice, so a template that rewrites earlier turns
(Qwen3 drops old thinking) changes nothing that was said.

Text from outside is encoded by itself and never yields a control token, whatever it
spells: a tool result cannot end its own block or open another turn.

A template that knows of no tools gets them as text, and results as messages of the
user. Left out: calls written in XML; several calls in one turn are told apart, but the
caller takes one.

`ChatFormat` is that for any tools, `ChatDialect` the coding agent's language in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from gagar_mini.agent.dialect import TOOL_ARGUMENTS, MalformedCall
from gagar_mini.model.tokenizer import decode_ids, encode_text
from gagar_mini.types import Task, ToolCall

Message = Mapping[str, object]
ChatTool = Mapping[str, object]
"""A message, and a tool, as the chat completions API describes them."""

DATE = "26 Jul 2024"
"""Told to templates that ask for today's date: a prompt must not change overnight."""

SYSTEM, USER, SAID, RESULT, NAME, KEY, VALUE = (
    f"zq-{word}-zq"
    for word in ("system", "user", "said", "result", "name", "key", "value")
)
"""Marks in place of the words of a chat: no template escapes or trims them."""

QUOTED = f'{RESULT}"{RESULT}'
"""A result that shows whether the template writes results as JSON strings (Llama-3)."""

ARGUMENTS = {KEY: VALUE}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": NAME, "arguments": ARGUMENTS},
        }
    ],
}

PLAIN_TOOLS = """\
You have these tools:
%s

To call one, reply with one JSON object on a line of its own:
{"name": "the tool", "arguments": {"the argument": "its value"}}"""

AGENT_PROMPT = """\
You repair a Python repository with tools. Make one tool call in each turn, and read \
what it returns. When the task is done, call submit."""

TOOL_PURPOSES = {
    "ls": "List all files.",
    "view": "Show a file.",
    "edit": "Replace text in a file. The old text must occur exactly once in it.",
    "create": "Write a new file.",
    "run_check": "Run the visible check.",
    "submit": "Hand in the repository as it is. Nothing follows.",
    "bash": "Run a shell command in the root folder. Only files are remembered.",
}


@dataclass(frozen=True)
class ChatCall:
    """A call as a model wrote it, its arguments as JSON values."""

    name: str
    arguments: Mapping[str, object]


MARKED = ChatCall(NAME, ARGUMENTS)


@dataclass(frozen=True)
class Slot:
    """Template text around words to come; `is_json`: they stand in a JSON string."""

    before: str
    after: str
    is_json: bool = False


@dataclass(frozen=True)
class ChatPieces:
    """A chat template taken apart. `call` holds what stands before a tool's name,
    between it and the arguments, and behind them up to the end of the turn."""

    prompt: tuple[str, ...]
    message: Slot
    result: Slot
    call: tuple[str, str, str]
    ends: tuple[str, ...]
    opens_thinking: bool
    has_tools: bool

    @property
    def has_system(self) -> bool:
        return len(self.prompt) == 3


class ChatFormat:
    """How one tokenizer writes a chat with these tools.

    `stop_ids` end a turn of the assistant; a sampled one is part of the turn.
    `thinking` is told to templates that ask. Raises ValueError for a tokenizer without
    a chat template that can be continued.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ChatTool] = (),
        *,
        thinking: bool = False,
    ):
        self.tokenizer = tokenizer
        self.pieces = take_apart(tokenizer, tools, thinking)
        self._controls = control_pattern(tokenizer)
        self._plain = ""
        if tools and not self.pieces.has_tools:
            self._plain = PLAIN_TOOLS % "\n".join(map(plain_tool, tools))
        ends = tokenizer.convert_tokens_to_ids(list(self.pieces.ends))
        self._end_id = ends[0]
        self.stop_ids = tuple(sorted({*ends, tokenizer.eos_token_id} - {None}))

    def prompt_ids(self, system: str, user: str) -> list[int]:
        """The system prompt, the first message of the user, and the opened turn."""
        words = [f"{system}\n\n{self._plain}" if self._plain else system, user]
        if not self.pieces.has_system:
            words = ["\n\n".join(words)]
        first, *others = self.pieces.prompt
        ids = self._scaffold(first)
        for text, piece in zip(words, others, strict=True):
            ids += [*self.encode(text), *self._scaffold(piece)]
        return ids

    def observation_ids(
        self, text: str, *, is_result: bool = True, is_finished: bool = True
    ) -> list[int]:
        """What follows a turn of the assistant: `text` as the result of its call, or as
        a message of the user, and the next opened turn. A turn that a limit cut off
        (not `is_finished`) is ended first."""
        slot = self.pieces.result if is_result else self.pieces.message
        shown = json.dumps(text, ensure_ascii=False)[1:-1] if slot.is_json else text
        end = [] if is_finished else [self._end_id]
        before, after = self._scaffold(slot.before), self._scaffold(slot.after)
        return [*end, *before, *self.encode(shown), *after]

    def call_ids(self, name: str, arguments: Mapping[str, object]) -> list[int]:
        """The turn that makes a call, its end included: what a model should say."""
        start, middle, end = map(self._scaffold, self.pieces.call)
        written = json.dumps(dict(arguments), ensure_ascii=False)
        return [*start, *self.encode(name), *middle, *self.encode(written), *end]

    def calls(self, ids: Sequence[int]) -> list[ChatCall | None]:
        """The calls of a turn in order; None stands for one that cannot be read."""
        end = len(ids) - 1 if ids and ids[-1] in self.stop_ids else len(ids)
        text = decode_ids(self.tokenizer, ids[:end])
        thought = "<think>" if self.pieces.opens_thinking else ""
        return find_calls(without_thinking(thought + text))

    def encode(self, text: str) -> list[int]:
        """Ids of text from outside, without any control token."""
        # cut inside whatever spells a control token, so that no piece spells one
        cuts = [match.start() + 1 for match in self._controls.finditer(text)]
        bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
        pieces = [encode_text(self.tokenizer, text[a:b]) for a, b in bounds]
        return [token for piece in pieces for token in piece]

    def _scaffold(self, text: str) -> list[int]:
        """Ids of the template's own text: here a control token is one."""
        return self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=False
        )


class ChatDialect:
    """The agent's tools as chat tools, in any chat template (protocol: `Dialect`).

    `tools` are those of `RolloutConfig.tools`. A turn may hold words, a thought, and
    several calls: the first call counts. Without a call that fits, the turn is
    malformed, and its answer is a message of the user, since there is no call to which
    it could be a result. Raises ValueError for a tokenizer that cannot chat.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Literal["edit", "bash"] = "edit",
        thinking: bool = False,
    ):
        self._arguments = dict(TOOL_ARGUMENTS)
        if tools == "bash":
            self._arguments["bash"] = ("command",)
        described = [
            agent_tool(name, self._arguments[name]) for name in self._arguments
        ]
        self.format = ChatFormat(tokenizer, described, thinking=thinking)
        self.stop_ids = self.format.stop_ids

    def prompt_ids(self, task: Task) -> list[int]:
        """The statement and the names of the files; where the template does not know of
        tools, a first call is shown, too: small models do not hit the form unseen."""
        paths = sorted(task.files)
        words = "\n".join([task.statement, "", "The files:", *paths])
        if not self.format.pieces.has_tools and paths:
            call = {"name": "view", "arguments": {"path": paths[0]}}
            words += f"\n\nFor example, this shows a file:\n{json.dumps(call)}"
        return self.format.prompt_ids(AGENT_PROMPT, words)

    def observation_ids(
        self, call: ToolCall | None, text: str, *, is_finished: bool = True
    ) -> list[int]:
        return self.format.observation_ids(
            text, is_result=call is not None, is_finished=is_finished
        )

    def call_ids(self, call: ToolCall, context: Sequence[int]) -> list[int]:
        return self.format.call_ids(call.name, call.arguments)

    def parse(self, ids: Sequence[int], context: Sequence[int]) -> ToolCall:
        call = choose_call(self.format.calls(ids), "submit")
        if call is None:
            raise MalformedCall("there is no tool call in this turn")
        names = self._arguments.get(call.name)
        if names is None:
            raise MalformedCall(f"there is no tool {call.name[:40]!a}")
        given = {k: as_text(v) for k, v in call.arguments.items() if type(v) is str}
        if not set(names) == set(given) == set(call.arguments):
            takes = f"{', '.join(names)} as strings" if names else "no argument"
            raise MalformedCall(f"{call.name} takes {takes}")
        return ToolCall(call.name, given)


def plain_tool(tool: ChatTool) -> str:
    """A tool as one line of text: a schema where an argument is more than a string."""
    function = tool["function"]
    properties = function["parameters"]["properties"]
    if any(schema != {"type": "string"} for schema in properties.values()):
        return json.dumps(tool)
    return f"{function['name']}({', '.join(properties)}): {function['description']}"


def as_text(value: str) -> str:
    """A JSON string may spell half of a surrogate pair, which is no text: "?"."""
    return value.encode("utf-8", "replace").decode()


def agent_tool(name: str, arguments: Sequence[str]) -> ChatTool:
    """A tool of the agent, all of whose arguments are strings."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": TOOL_PURPOSES[name],
            "parameters": parameters,
        },
    }


def take_apart(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[ChatTool], thinking: bool
) -> ChatPieces:
    """The pieces of a chat template with these tools. Raises ValueError."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: a chat model is needed, as a rule one "
            "that is called Instruct or Chat"
        )
    if tools:
        try:
            return Template(tokenizer, tools, thinking).with_tools()
        except Exception:  # a template without tools refuses them, by any error
            pass
    try:
        return Template(tokenizer, (), thinking).without_tools()
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"the chat template cannot be continued: {told}") from error


class Template:
    """A chat template at work on chats of marks; errors are the template's own, or
    ValueError where a mark is not where it should be."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ChatTool],
        thinking: bool,
    ):
        self.tokenizer = tokenizer
        self.tools = list(tools) or None
        self.thinking = thinking
        self.chat: list[Message] = [{"role": "user", "content": USER}]
        self.marks = (USER,)
        system: Message = {"role": "system", "content": SYSTEM}
        if self.takes([system, *self.chat]):
            self.chat.insert(0, system)
            self.marks = (SYSTEM, USER)

    def takes(self, chat: list[Message]) -> bool:
        """Whether the template shows a system prompt; some refuse the role."""
        try:
            return SYSTEM in self.render(chat)
        except Exception:
            return False

    def render(self, chat: list[Message], *, is_turn_open: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat,
            tools=self.tools,
            add_generation_prompt=is_turn_open,
            tokenize=False,
            enable_thinking=self.thinking,
            date_string=DATE,
        )

    def without_tools(self) -> ChatPieces:
        """Tools are for the user's words to explain; a call is one line of JSON."""
        prompt, message, end = self.talk()
        thinks = opens_thought(prompt[-1])
        start = f'{"</think>" if thinks else ""}{{"name": "'
        call = (start, '", "arguments": ', "}" + end)
        return ChatPieces(prompt, message, message, call, (end,), thinks, False)

    def with_tools(self) -> ChatPieces:
        prompt, message, end = self.talk()
        asked = [*self.chat, CALLING, {"role": "tool", "name": NAME, "content": QUOTED}]
        text = self.render(asked)
        is_json = QUOTED not in text
        shown = json.dumps(QUOTED)[1:-1] if is_json else QUOTED
        _, between, after = split_at(text, VALUE, shown)
        _, call_end, before = split_at_end(between, end, self.tokenizer)
        result = Slot(before, after, is_json)
        call = self.call_pieces(prompt[-1], call_end)
        thinks, ends = opens_thought(prompt[-1]), (end, call_end)
        return ChatPieces(prompt, message, result, call, ends, thinks, True)

    def talk(self) -> tuple[tuple[str, ...], Slot, str]:
        """The prompt in pieces, what surrounds a message of the user that follows an
        answer, and the token that ends an answer."""
        prompt = split_at(self.render(self.chat), *self.marks)
        said = {"role": "assistant", "content": SAID}
        text = self.render([*self.chat, said, {"role": "user", "content": RESULT}])
        _, between, after = split_at(text, SAID, RESULT)
        _, end, before = split_at_end(between, "", self.tokenizer)
        return prompt, Slot(before, after), end

    def call_pieces(self, prompt_end: str, end: str) -> tuple[str, str, str]:
        """What surrounds the name and the arguments of a call, without a thought."""
        text = self.render([*self.chat, CALLING], is_turn_open=False)
        opening = prompt_end.partition("<think>")[0]
        said = split_at(split_at(text, USER)[1], opening)[1]
        arguments = json.dumps(ARGUMENTS)
        start, middle, after = split_at(said, NAME, arguments)
        start = re.sub(r"^<think>\s*</think>\s*", "", start)
        after = split_at(after, end)[0]
        if find_calls(start + NAME + middle + arguments + after) != [MARKED]:
            raise ValueError("its calls are written in a way that nobody reads here")
        if opens_thought(prompt_end):
            start = "</think>\n\n" + start
        return start, middle, after + end


def opens_thought(prompt_end: str) -> bool:
    return prompt_end.rstrip().endswith("<think>")


def split_at(text: str, *marks: str) -> tuple[str, ...]:
    """The parts of `text` between marks that occur in this order, the first time each.

    Raises ValueError where one does not.
    """
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"it does not show {mark!r}")
        parts.append(part)
    return (*parts, text)


def split_at_end(
    text: str, end: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str, str]:
    """`text` at the token that ends a turn: `end` if it is there, else the first
    special token. Raises ValueError where there is none."""
    special = [t.content for t in added_tokens(tokenizer) if t.special]
    names = [end] if end and end in text else [*special, *tokenizer.all_special_tokens]
    found = re.search("|".join(map(re.escape, longest_first(names))) or "$^", text)
    if found is None:
        raise ValueError("no special token ends a turn of the assistant")
    return text[: found.start()], found.group(), text[found.end() :]


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> list:
    return list(tokenizer.added_tokens_decoder.values())


def longest_first(names: Sequence[str]) -> list[str]:
    return sorted(set(names), key=len, reverse=True)


def control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches where the name of a control token begins.

    Those are all added tokens, special or not (Qwen's <tool_call> is not), but runs of
    white space and single characters, which are text.
    """
    names = {token.content for token in added_tokens(tokenizer)}
    names |= set(tokenizer.all_special_tokens)
    spelled = [name for name in names if len(name.strip()) > 1]
    alternatives = "|".join(map(re.escape, longest_first(spelled)))
    return re.compile(f"(?=(?:{alternatives or '$^'}))")


def without_thinking(text: str) -> str:
    """What follows a thought at the beginning; nothing where the thought has no end."""
    if not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


BLOCK, BLOCK_END = "<tool_call>", "</tool_call>"
BLOCK_START = re.compile(BLOCK)
LINE_START = re.compile(
    r'(?:^|;|<\|python_tag\|>)[ \t]*(?=\{\s*"(?:name|type)"\s*:)', re.MULTILINE
)


def find_calls(text: str) -> list[ChatCall | None]:
    """The calls in `text`, in order; None for what begins like one and is none.

    Blocks <tool_call>...</tool_call> with an object or a list of objects (Qwen,
    SmolLM2); without any, objects that begin a line (Llama-3, plain JSON, in a code
    fence or not). Strict where it matters: a key twice, NaN, or anything behind the
    JSON of a block make a call unreadable.
    """
    bare, outside = scan(text, LINE_START)
    if BLOCK not in outside:  # a string inside a call may quote one
        return [as_call(value) for value, _ in bare]
    calls: list[ChatCall | None] = []
    for value, rest in scan(text, BLOCK_START)[0]:
        is_whole = not rest.strip() or rest.lstrip().startswith(BLOCK_END)
        values = value if isinstance(value, list) and value else [value]
        calls += [as_call(value) if is_whole else None for value in values]
    return calls


def scan(text: str, pattern: re.Pattern[str]) -> tuple[list[tuple[object, str]], str]:
    """The JSON value behind each match with the text behind that, and the text outside
    all values."""
    found, outside, end = [], "", 0
    while start := pattern.search(text, end):
        outside += text[end : start.end()]
        value, end = read_value(text, start.end())
        found.append((value, text[end:]))
    return found, outside + text[end:]


def read_value(text: str, start: int) -> tuple[object, int]:
    """The JSON value at `start`, behind white space, and where it ends; where there is
    none, None and a character further on, so that a search goes on."""
    begin = len(text) - len(text[start:].lstrip())
    try:
        return DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin + 1


def as_call(value: object) -> ChatCall | None:
    """A JSON value as a call: "arguments" (or Llama's "parameters") is an object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(given) != 1 or not isinstance(given[0], dict):
        return None
    return ChatCall(value["name"], given[0])


def choose_call(calls: Sequence[ChatCall | None], final: str) -> ChatCall | None:
    """The call that counts: the first. None where there is no call at all.

    Raises MalformedCall where the first cannot be read, and for the tool `final` among
    several calls: what was only quoted must not end anything.
    """
    if not calls:
        return None
    if calls[0] is None:
        raise MalformedCall("the call cannot be read")
    if len(calls) > 1 and any(call and call.name == final for call in calls):
        raise MalformedCall(f"{final} stands alone")
    return calls[0]


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


DECODER = json.JSONDecoder(
    object_pairs_hook=_distinct,
    parse_constant=_refuse,
    strict=False,  # a line break inside a string is a small model's slip
)
