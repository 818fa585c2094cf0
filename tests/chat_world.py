"""Tokenizers of a few hundred tokens with the chat templates of real families.

The templates are written out small: the same marks, in the same places, as the
families' own.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

QWEN25 = """\
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[1:] %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' }}{{ call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Rewrites earlier turns: the thought of the last turn alone is shown.
QWEN3 = QWEN25.replace(
    "{%- if message.content %}{{ '\\n' + message.content }}{% endif %}",
    "{%- set parts = message.content.split('</think>') %}"
    "{%- if message.role == 'assistant' and loop.last %}"
    "{{ '\\n<think>\\n' + (parts[0] if parts | length > 1 else '') }}"
    "{{ '\\n</think>\\n' }}"
    "{%- endif %}"
    "{%- if parts[-1] %}{{ '\\n' + parts[-1] }}{% endif %}",
).replace(
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}",
)

# Opens the thought itself, as models do that always think.
THINKER = QWEN25.replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)

LLAMA3 = """\
{{- '<|begin|><|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string }}
{{- '\\n\\n' + messages[0].content | trim + '<|eot_id|>' }}
{%- for message in messages[1:] %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is iterable %}{{ message.content | tojson }}{% endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}
            {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}
            {{- call.arguments | tojson }}{{ '}' }}
        {%- else %}{{ message.content | trim }}{% endif %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

SMOL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Refuses a system prompt, and knows of no tools.
GEMMA = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

FAMILIES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "thinker": THINKER,
    "llama3": LLAMA3,
    "smol": SMOL,
    "gemma": GEMMA,
}
SPECIAL = (
    "<|im_end|>",
    "<|im_start|>",
    "<|begin|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Control tokens that are not special: so it is in Qwen's tokenizers."""


def chat_tokenizer(
    family: str = "qwen2.5", *, is_lossy: bool = False
) -> PreTrainedTokenizerFast:
    """One token a byte, and the control tokens; its padding token ends a turn, too.

    With `is_lossy` text is lower-cased first, so that decoding and encoding again gives
    other ids.
    """
    alphabet = sorted(pre.ByteLevel.alphabet())
    merges = [("a", "b"), ("i", "d")]  # to encode differs from letter by letter
    vocab = {name: i for i, name in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if is_lossy:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    )
    tokenizer.add_tokens(
        [AddedToken(name, special=False, normalized=False) for name in ADDED]
    )
    end = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(family, "<|im_end|>")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = FAMILIES[family]
    return wrapped
