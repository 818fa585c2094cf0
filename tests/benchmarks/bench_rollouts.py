"""Rollouts of several turns: this package's engine against transformers `generate`.

    python tests/benchmarks/bench_rollouts.py --threads 1

Three ways to sample the same conversations with the same weights: the torch engine;
`generate` on the whole context at each turn; `generate` with its cache kept between
turns, where shorter observations leave holes that the attention mask hides. Each turn
samples the same number of tokens (nothing stops early), and each conversation sees the
same observations. Medians over interleaved repeats in one process. The times that
count are CPU seconds of the process, which other work on the machine changes little; of
these, the ratios. The engine also returns log-probs, `generate` does not have to.
"""

import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from gagar_mini.model.policy import PolicyConfig, TinyPolicy, save_policy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.types import Engine, SamplingParams

PAD = 0


@dataclass(frozen=True)
class Options:
    """What is rolled out: by default 64 conversations of 6 turns, 8 to a prompt."""

    threads: int = 1
    num_conversations: int = 64
    group_size: int = 8
    num_turns: int = 6
    prompt_tokens: int = 256
    new_tokens: int = 16
    """Sampled tokens of each turn."""
    max_observation_tokens: int = 48
    """Observations have 8 to this many tokens."""
    repeats: int = 3
    out: Path = Path("data/results/bench_rollouts.json")


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    prompts, observations = conversations(options)
    policy, model = same_model_twice()
    ways: dict[str, Callable[[], int]] = {
        "engine": lambda: run_engine(policy, prompts, observations, options),
        "generate, fresh prefill": lambda: run_fresh(
            model, prompts, observations, options
        ),
        "generate, cache kept": lambda: run_cached(
            model, prompts, observations, options
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    wall_s: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, run in ways.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            num_sampled = run()
            taken = time.process_time() - begin_cpu
            if repeat > 0:  # the first one warms up
                seconds[name].append(taken)
                wall_s[name].append(time.perf_counter() - begin)
            print(f"{name}: {taken:.2f} CPU s", flush=True)
    result = summarise(options, seconds, num_sampled, prompts, observations)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "wall_s": wall_s}, indent=2) + "\n")
    print(json.dumps(result["speedup_of_engine"], indent=2))
    print(
        f"engine: {result['engine_tokens_per_cpu_s']:.0f} tokens read or sampled/CPU s"
    )


def conversations(options: Options) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts by conversation, equal inside a group, and observations by turn."""
    generator = np.random.default_rng(0)

    def draw(length: int) -> list[int]:
        return generator.integers(1, PolicyConfig().vocab_size, length).tolist()

    num_groups = options.num_conversations // options.group_size
    groups = [draw(options.prompt_tokens) for _ in range(num_groups)]
    prompts = [prompt for prompt in groups for _ in range(options.group_size)]
    observations = [
        [
            draw(int(generator.integers(8, options.max_observation_tokens + 1)))
            for _ in prompts
        ]
        for _ in range(options.num_turns - 1)
    ]
    return prompts, observations


def same_model_twice() -> tuple[TinyPolicy, PreTrainedModel]:
    """A random policy, and what transformers makes of its folder."""
    policy = TinyPolicy(PolicyConfig())
    fillers = [f"<|{i}|>" for i in range(PolicyConfig().vocab_size - 256)]
    tokenizer = train_tokenizer([], vocab_size=1024, special_tokens=fillers)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(policy, tokenizer, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return policy, model.eval()


def run_engine(
    policy: TinyPolicy,
    prompts: list[list[int]],
    observations: list[list[list[int]]],
    options: Options,
) -> int:
    """Sampled tokens. The engine is made anew: nothing is carried over."""
    engine = TorchEngine(policy, max_rows=options.num_conversations)
    return asyncio.run(roll_out(engine, prompts, observations, options))


async def roll_out(
    engine: Engine,
    prompts: list[list[int]],
    observations: list[list[list[int]]],
    options: Options,
) -> int:
    """Sampled tokens of all conversations, held at once with any engine."""
    sampling = SamplingParams(1.0, options.new_tokens, stop_ids=())

    async def talk(index: int) -> int:
        ids, num_sampled = list(prompts[index]), 0
        with engine.conversation() as conversation:
            for turn in range(options.num_turns):
                seed = index * options.num_turns + turn
                completion = await conversation.complete(ids, sampling, seed)
                ids += completion.ids.tolist()
                num_sampled += len(completion.ids)
                if turn < len(observations):
                    ids += observations[turn][index]
        return num_sampled

    return sum(await asyncio.gather(*map(talk, range(len(prompts)))))


def run_fresh(
    model: PreTrainedModel,
    prompts: list[list[int]],
    observations: list[list[list[int]]],
    options: Options,
) -> int:
    """Sampled tokens; each turn reads the whole context again, padded on the left."""
    contexts = [list(prompt) for prompt in prompts]
    for turn in range(options.num_turns):
        padded, mask = pad_left(contexts)
        output = generate(model, padded, mask, options.new_tokens)
        sampled = output[:, padded.shape[1] :].tolist()
        for index, context in enumerate(contexts):
            context += sampled[index]
            if turn < len(observations):
                context += observations[turn][index]
    return len(prompts) * options.num_turns * options.new_tokens


def run_cached(
    model: PreTrainedModel,
    prompts: list[list[int]],
    observations: list[list[list[int]]],
    options: Options,
) -> int:
    """Sampled tokens; the cache grows by each turn, with holes before observations."""
    ids, mask = pad_left(prompts)
    cache = DynamicCache(config=model.config)
    for turn in range(options.num_turns):
        ids = generate(model, ids, mask, options.new_tokens, past_key_values=cache)
        mask = F.pad(mask, (0, options.new_tokens), value=True)
        if turn < len(observations):
            padded, is_real = pad_left(observations[turn])
            ids = torch.cat([ids, padded], dim=1)
            mask = torch.cat([mask, is_real], dim=1)
    return len(prompts) * options.num_turns * options.new_tokens


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    new_tokens: int,
    **cache: DynamicCache,
) -> Tensor:
    """`ids` with `new_tokens` more, sampled from the full softmax."""
    output = model.generate(
        ids,
        attention_mask=mask.long(),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=PAD,
        **cache,
    )
    assert output.shape[1] == ids.shape[1] + new_tokens
    return output


def pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The rows as one tensor, and True where a token is real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest) >= longest - lengths[:, None]


def summarise(
    options: Options,
    seconds: dict[str, list[float]],
    num_sampled: int,
    prompts: list[list[int]],
    observations: list[list[list[int]]],
) -> dict[str, object]:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # a prompt is read once per group by the engine, so it is counted once per group
    num_read = sum(len(ids) for turn in observations for ids in turn)
    num_read += sum(map(len, prompts)) // options.group_size
    return {
        "options": {**asdict(options), "out": options.out.name},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "sampled_tokens": num_sampled,
        "read_tokens": num_read,
        "cpu_s": seconds,
        "median_cpu_s": medians,
        "sampled_tokens_per_cpu_s": {n: num_sampled / s for n, s in medians.items()},
        "engine_tokens_per_cpu_s": (num_sampled + num_read) / medians["engine"],
        "speedup_of_engine": {n: s / medians["engine"] for n, s in medians.items()},
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
