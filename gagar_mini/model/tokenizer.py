"""A small byte-level BPE, kept as a Hugging Face folder, and a safe way to encode.

The tiny policy has a tokenizer of its own, since a vocabulary of 100,000 would outweigh
the rest of it. Text from outside (statements, files, tool output) goes through
`encode_text`, which never yields a special token: an observation cannot end a turn.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gagar_mini.records import parse_json

# A line break and the indent behind it are one piece, so an indented line costs one
# token more; digits stand alone, so a number looks the same wherever it is copied to.
PIECES = r"\r?\n[ \t]*|\p{N}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|[ \t]+|\s"


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, lossless on any text.

    `special_tokens` take the ids 0, 1, ... in their order; the first one is the padding
    token and has no other use. Raises ValueError for a special token that ordinary text
    could spell in one token.
    """
    for token in special_tokens:
        if not re.search(r"\w", token) or not re.search(r"[^\w\s]", token):
            raise ValueError(
                f"special token {token!r} must hold a letter and a punctuation mark, "
                "such as '<|end|>', so that no merge of ordinary text can spell it"
            )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special_tokens[0],
        extra_special_tokens=list(special_tokens[1:]),
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder; ValueError where there is none, or a
    damaged one."""
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"no tokenizer in {str(folder)!r}: tokenizer.json is missing")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (Path(folder) / name).is_file():
            parse_json((Path(folder) / name).read_bytes(), str(Path(folder) / name))
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the library raises its base class for a damaged file
        told = " ".join(str(error).split())
        raise ValueError(f"no tokenizer in {str(folder)!r}: {told}") from error


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of `text` as ordinary bytes: the name of a special token is spelled out.

    Nothing is added or cut. Lone surrogates, which are no text, become "?".
    """
    clean = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(clean, add_special_tokens=False, split_special_tokens=True)
    assert not set(ids) & set(tokenizer.all_special_ids), "text spelled a special token"
    return ids


def decode_ids(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens by their names. Broken UTF-8 becomes U+FFFD."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
