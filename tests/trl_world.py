"""A trainer of TRL on a model of some thousand weights; run by torchrun, a program.

`python tests/trl_world.py FOLDER` trains one step on three groups of four and writes
the advantages that each rank trains on into FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peer_world import T1, T3, ScriptedGrader
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from gagar_mini.config import CreditConfig
from gagar_mini.integrations.trl import GagarMixin

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


class GagarTrainer(GagarMixin, GRPOTrainer):
    """Keeps what it trains on."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.trained_on = output["advantages"].clone()
        return output


def make_trainer(folder, *, rewards, group_size, grader, rule="gagar", **settings):
    """A trainer whose rollouts get `rewards`, by their position over all ranks.

    `settings` of GRPOConfig, or, with the names of its arguments, of the mixin.
    """

    def scripted(prompts, **_):
        start = int(os.environ.get("RANK", "0")) * len(prompts)
        return list(rewards[start : start + len(prompts)])

    ours = ("to_task", "to_patch", "outcome", "grading_timeout_s")
    arguments = {name: settings.pop(name) for name in ours if name in settings}
    functions = settings.pop("reward_funcs", [scripted])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": len(rewards) // world,
            "num_generations": group_size,
            "max_completion_length": 4,
            "max_steps": 1,
            "learning_rate": 1e-2,
            "scale_rewards": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        | settings
    )
    return GagarTrainer(
        tiny_model(),
        functions,
        args,
        Dataset.from_list([{"prompt": word} for word in "abcdefgh"]),
        processing_class=tiny_tokenizer(),
        grader=grader,
        credit=CreditConfig(rule=rule),
        **arguments,
    )


def tiny_tokenizer():
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


# gradable, of one pass only, gradable; with six rows per rank the second is cut in two
RANKED_REWARDS = [1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1]


def main():
    folder = Path(sys.argv[1])
    grader = ScriptedGrader((T1, T3))
    trainer = make_trainer(folder, rewards=RANKED_REWARDS, group_size=4, grader=grader)
    trainer.train()
    record = {
        "advantages": trainer.trained_on.tolist(),
        "num_graded": len(grader.seen),
        "weight": trainer.model.state_dict()["lm_head.weight"].double().sum().item(),
    }
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(record))
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort or hang an interpreter's end


if __name__ == "__main__":
    main()
