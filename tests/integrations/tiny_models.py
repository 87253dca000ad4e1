"""Tiny random models of the architectures that the integration serves."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip

#: name -> (prefix of the classes, more settings, transformers' own path that can serve it)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-gqa": ("Llama", {}, "sdpa"),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}, "sdpa"),
    "qwen2": ("Qwen2", {}, "sdpa"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral-window": ("Mistral", {"sliding_window": 6}, "sdpa"),
    "gemma2-softcap": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}, "eager"),
    "gpt-oss-sinks": ("GptOss", {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
}  # fmt: skip

#: The same of mixtures of experts, whose experts the integration serves; the tests of attention need not know them.
MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sdpa"),
    "qwen3-moe": (
        "Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1]}, "sdpa",
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48}, "sdpa"),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6}, "eager"),
}  # fmt: skip


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model in evaluation mode, the same at every call."""
    prefix, more, _ = (ARCHITECTURES | MIXTURES)[name]
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**_SIZES | more))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("sinks", "proj_bias")):  # transformers begins with zeros
            torch.nn.init.normal_(parameter)
    return model.to(device, dtype).eval()
