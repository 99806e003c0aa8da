"""Tiny random models that engines load as if they were real ones, made once and kept in the cache.

    python make_models.py NAME...

prints the folder that holds them. Needs torch, transformers and tokenizers: run it with an engine's environment. The
models depend on this file alone, so its hash names the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 512
# LoRA adapters for ``llama``, and their seeds.
ADAPTERS = {"lora_a": 1, "lora_b": 2}


def models_folder() -> Path:
    """Where the models that this version of the file makes are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return cache / "kvcanary-agent" / f"models-{digest}"


def make_model(name: str, folder: Path) -> None:
    """Write the model and its tokenizer to ``folder / name``, whole or not at all; leave it alone if it is there."""
    target = folder / name
    if target.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as unfinished:
        _write(name, Path(unfinished, name))
        try:
            Path(unfinished, name).rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Somebody else was faster.


def _write(name: str, target: Path) -> None:
    if name in ADAPTERS:
        _write_adapter(ADAPTERS[name], target)
    else:
        _write_model(name, target)


def _write_adapter(seed: int, target: Path) -> None:
    """A LoRA adapter of rank 8 for ``llama``, in the format of PEFT."""
    import torch
    from safetensors.torch import save_file

    rank, config = 8, _recipe("llama")[1]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator) / 4
            weights[f"{prefix}.lora_B.weight"] = torch.randn(heads * config.head_dim, rank, generator=generator) / 4
    target.mkdir()
    save_file(weights, target / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (target / "adapter_config.json").write_text(json.dumps(described))


def _write_model(name: str, target: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model_class, config = _recipe(name)
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                # Larger weights, so that greedy decoding varies instead of repeating one token.
                parameter.mul_(4.0)
    model.save_pretrained(target)
    vocabulary = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="t1", eos_token="t2", unk_token="t0")
    tokenizer.save_pretrained(target)


def _recipe(name: str) -> tuple[Any, Any]:
    """The class and the configuration of a model."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    small = {**common, "num_key_value_heads": 2, "head_dim": 32}
    if name == "llama":
        return transformers.LlamaForCausalLM, transformers.LlamaConfig(num_hidden_layers=3, **small)
    if name == "llama_one_kv_head":
        config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, head_dim=32, **common)
        return transformers.LlamaForCausalLM, config
    if name == "llama8":
        # Large enough that a step's time says something about a server's.
        config = transformers.LlamaConfig(
            **{**common, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
            num_hidden_layers=8,
            num_key_value_heads=4,
            head_dim=64,
        )
        return transformers.LlamaForCausalLM, config
    if name == "mistral_sliding":
        config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=64, **small)
        return transformers.MistralForCausalLM, config
    if name == "gemma3_hybrid":
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=64,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            **small,
        )
        return transformers.Gemma3ForCausalLM, config
    if name == "olmo3_hybrid":
        config = transformers.Olmo3Config(
            num_hidden_layers=4,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            # What makes SGLang give the sliding layers a pool of their own.
            is_hybrid_swa=True,
            hybrid_layer_pattern=[1, 0] * 2,
            # The engine works the heads' width out from that of the model.
            **{**small, "head_dim": 16},
        )
        return transformers.Olmo3ForCausalLM, config
    if name == "deepseek_mla":
        config = transformers.DeepseekV2Config(
            num_hidden_layers=2,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            first_k_dense_replace=2,
            **common,
        )
        return transformers.DeepseekV2ForCausalLM, config
    raise SystemExit(
        f"make_models.py: unknown model {name!r}; known: llama, llama8, llama_one_kv_head, mistral_sliding, "
        f"gemma3_hybrid, olmo3_hybrid, deepseek_mla, {', '.join(ADAPTERS)}"
    )


def main(names: list[str]) -> None:
    folder = models_folder()
    for name in names:
        make_model(name, folder)
    print(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
