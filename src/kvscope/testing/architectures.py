"""Configurations of more of vLLM's architectures, as small as they get, without weights.

    register_random_weights()
    with running(outline("gpt-oss"), load_format=RANDOM_WEIGHTS) as llm: ...

Each stands for a kind of KV cache that `kvscope.testing.models` has not: other groups, latent attention with a query
rank, states instead of blocks, a draft head. Names of a checkpoint's tensors differ from one architecture to the next;
`random_weights` fills whatever vLLM makes of the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from kvscope.testing import models
from kvscope.testing.environment import cache_directory

Outline = Literal[
    "llama",
    "llama-8",
    "eagle",
    "eagle3",
    "mimo",
    "gpt-oss",
    "llama4",
    "deepseek-v3",
    "qwen3-next",
    "mamba2",
    "falcon-h1",
    "whisper",
]

_LAYER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
_LLAMA: dict[str, Any] = _LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

_CONFIGS: dict[Outline, dict[str, Any]] = {
    "llama": _LLAMA | {"num_hidden_layers": 2},
    # EAGLE-3 reads the hidden states of three layers of its target, the last of them the fourth from the end.
    "llama-8": _LLAMA | {"num_hidden_layers": 8},
    "eagle": _LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1},
    "eagle3": _LLAMA
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": models.VOCABULARY},
    "mimo": _LAYER
    | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,  # the head's size follows from it
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "rope_theta": 640000,
        "use_sliding_window": False,
    },
    "gpt-oss": _LAYER
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "attention_bias": True,
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 2048,
        },
    },
    "llama4": _LAYER
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 128,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "rope_theta": 500000.0,
        "attn_temperature_tuning": False,
        "for_llm_compressor": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        # vLLM's CPU kernel for latent attention knows the sizes of the published models only.
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "qwen3-next": _LAYER
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "n_groups": 1,
        "chunk_size": 16,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "rms_norm": True,
        "residual_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "falcon-h1": _LAYER
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "projectors_bias": False,
        "mlp_bias": False,
        "rope_theta": 1e5,
        "attn_layer_indices": None,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "decoder_start_token_id": 1,
        "scale_embedding": False,
        "tie_word_embeddings": True,
    },
}

_WHISPER_EARS: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "nb_max_frames": 3000,
    "n_samples": 480000,
    "return_attention_mask": False,
}


def outline(name: Outline, directory: Path | None = None) -> Path:
    """The folder with the configuration and the tokenizer, below `build/models` unless said otherwise."""
    config = {
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "vocab_size": models.VOCABULARY,
        "max_position_embeddings": models.POSITIONS,
    } | _CONFIGS[name]
    more = {"preprocessor_config.json": _WHISPER_EARS} if name == "whisper" else {}

    def write(draft: Path) -> None:
        models.write_tokenizer(draft)
        for file, contents in ({"config.json": config} | more).items():
            models.write_json(draft / file, contents)

    return models.put((directory or cache_directory() / "models") / f"outline-{name}", [config, more], write)


def lora_adapter(directory: Path | None = None) -> Path:
    """A LoRA adapter of rank 4 for the attention of `kvscope.testing.models.build("qwen3")`; it changes the answers."""
    import numpy as np
    from safetensors.numpy import save_file

    hidden, widths, rank = 64, {"q_proj": 128, "v_proj": 64}, 4
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(widths),
        "bias": "none",
    }

    def write(draft: Path) -> None:
        dice, tensors = np.random.default_rng(9), {}
        for layer in range(2):
            for module, width in widths.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (width, rank))):
                    tensors[f"{prefix}.{part}.weight"] = (0.3 * dice.standard_normal(shape)).astype(np.float32)
        save_file(tensors, str(draft / "adapter_model.safetensors"))
        models.write_json(draft / "adapter_config.json", config)

    return models.put((directory or cache_directory() / "models") / "adapter", [config, widths, hidden], write)
