"""Small random models of published families, in folders like those of the hub.

Each configuration has the keys of the published config.json, and its values but for sizes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 29,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "transformers_version": "4.51.0",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NO_BIAS = {"attention_bias": False, "attention_dropout": 0.0}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 20,
    "max_window_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    **NO_BIAS,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "pretraining_tp": 1,
    "rope_scaling": None,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_theta": 1e6,
    "sliding_window": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
}
CASES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3,
    "Qwen3-0.6B, YaRN": {**QWEN3, "rope_scaling": YARN},
    "Qwen3-8B": {
        **QWEN3,
        "tie_word_embeddings": False,
        "head_dim": 12,
        "num_key_value_heads": 1,
    },
    "Llama-2-7b": {**LLAMA, "num_key_value_heads": 4, "torch_dtype": "float16"},
    "Llama-2, linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Llama-3.2-1B": {
        **LLAMA,
        **NO_BIAS,
        "head_dim": 12,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "tie_word_embeddings": True,
        "eos_token_id": [7, 8],
    },
    "SmolLM2-135M": {
        **LLAMA,
        **NO_BIAS,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "num_attention_heads": 6,
    },
    "Mistral-7B-v0.1": {**MISTRAL, "rope_theta": 10000.0, "sliding_window": 5},
    "Mistral-7B-v0.3": MISTRAL,
    "Mistral-Nemo": {**MISTRAL, "head_dim": 20},
}


def published(case: str, folder: Path, **changes: Any) -> Any:
    """A model with random gains, saved in half precision in several files.

    Returns the model that transformers reads from `folder` in float32.
    """
    record = {**COMMON, **CASES[case], **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(record))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(getattr(torch, record["torch_dtype"]))
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "config.json").write_text(json.dumps(record))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
