"""Tiny models of real architectures, with a byte-level tokenizer and real random weights.

Weights matter even where nobody reads the text: with the engine's own dummy weights the logits are uniform and do not
depend on the KV cache, so that a test of the cache could not fail. The ones written here are seeded, and scaled so that
the next token follows from what attention reads: where the output layer is the embedding, large embeddings would only
repeat the last token, and flat attention would only see an average. Changing one token early in a prompt changes the
continuation.

    python -m kvscope.testing.models build/models
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from kvscope.testing.environment import cache_directory

Kind = Literal["qwen3", "qwen3-one-head", "gemma3", "deepseek-v2"]
"""`qwen3`: full attention, one group; with one head of keys, `qwen3-one-head`. `gemma3`: five sliding-window layers,
one full. `deepseek-v2`: latent (MLA)."""

Shape = tuple[int, ...]
Weight = tuple[str, Shape, float]
"""A tensor's name and shape, and its standard deviation; a vector is a norm's scale and holds the number itself."""

_SEED = 7
VOCABULARY = 512
POSITIONS = 4096
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_MARK = "kvscope-model.json"

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        # vLLM's CPU kernel for latent attention knows the sizes of the published models only.
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rope_theta": 10000,
        "tie_word_embeddings": False,
    },
}


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Weight]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden), 0.2
    yield f"{prefix}.up_proj.weight", (inner, hidden), 0.2
    yield f"{prefix}.down_proj.weight", (hidden, inner), 0.2


def _grouped_attention(prefix: str, config: dict[str, Any], *, q_norm: float, k_norm: float) -> Iterator[Weight]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield f"{prefix}.q_proj.weight", (queries, hidden), 0.3
    yield f"{prefix}.k_proj.weight", (keys, hidden), 0.3
    yield f"{prefix}.v_proj.weight", (keys, hidden), 0.5
    yield f"{prefix}.o_proj.weight", (hidden, queries), 1.0
    yield f"{prefix}.q_norm.weight", (head,), q_norm
    yield f"{prefix}.k_norm.weight", (head,), k_norm


def _latent_attention(prefix: str, config: dict[str, Any]) -> Iterator[Weight]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{prefix}.q_proj.weight", (heads * (plain + rope), hidden), 0.2
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden), 0.2
    yield f"{prefix}.kv_a_layernorm.weight", (rank,), 1.0
    yield f"{prefix}.kv_b_proj.weight", (heads * (plain + value), rank), 0.1
    yield f"{prefix}.o_proj.weight", (hidden, heads * value), 0.3


def _qwen3(config: dict[str, Any]) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden), 0.05
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), 1.0
        yield from _grouped_attention(f"{prefix}.self_attn", config, q_norm=4.0, k_norm=1.0)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 1.0
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,), 1.0


def _gemma3(config: dict[str, Any]) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    yield "model.embed_tokens.weight", (VOCABULARY, hidden), 0.1
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        # Gemma's norms scale by one plus the weight.
        yield from ((f"{prefix}.{norm}_layernorm.weight", (hidden,), 0.0) for norm in norms)
        yield from _grouped_attention(f"{prefix}.self_attn", config, q_norm=3.0, k_norm=0.0)
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,), 0.0


def _deepseek_v2(config: dict[str, Any]) -> Iterator[Weight]:
    hidden, expert = config["hidden_size"], config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden), 1.0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,), 1.0
        yield from _latent_attention(f"{prefix}.self_attn", config)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 1.0
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (config["n_routed_experts"], hidden), 0.2
        yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, expert * config["n_shared_experts"])
        for index in range(config["n_routed_experts"]):
            yield from _mlp(f"{prefix}.mlp.experts.{index}", hidden, expert)
    yield "model.norm.weight", (hidden,), 1.0
    yield "lm_head.weight", (VOCABULARY, hidden), 1.0


_CONFIGS["qwen3-one-head"] = _CONFIGS["qwen3"] | {"num_key_value_heads": 1}
_WEIGHTS = {"qwen3": _qwen3, "qwen3-one-head": _qwen3, "gemma3": _gemma3, "deepseek-v2": _deepseek_v2}


def build(kind: Kind, directory: Path | None = None) -> Path:
    """Write the model into `directory/kind` unless it is there already, and return that folder.

    The default directory is `build/models` of a checkout, else the user's cache. Several processes may build at once:
    each writes into a folder of its own and renames it into place when it is complete.
    """
    config = _COMMON | _CONFIGS[kind]
    weights = list(_WEIGHTS[kind](config))

    def write(draft: Path) -> None:
        write_tokenizer(draft)
        _write_weights(draft, weights)
        write_json(draft / "config.json", config)

    return put((directory or cache_directory() / "models") / kind, [_SEED, config, weights], write)


def put(target: Path, contents: object, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a folder that then becomes `target`, unless one with the same `contents` is there already."""
    mark = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    if _mark_of(target) == mark:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(draft)
        write_json(draft / _MARK, {"sha256": mark})
        draft.chmod(0o755)
        _put_in_place(draft, target, mark)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _mark_of(target: Path) -> str | None:
    try:
        return str(json.loads((target / _MARK).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError):
        return None


def _put_in_place(draft: Path, target: Path, mark: str) -> None:
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        draft.rename(target)
    except OSError:
        # Another process was faster, which is as good unless it wrote something else.
        if _mark_of(target) != mark:
            raise


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(directory: Path) -> None:
    """One token a byte, after the special ones: any text can be encoded, and nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    model = models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": POSITIONS,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    write_json(directory / "tokenizer_config.json", settings)


def _write_weights(directory: Path, weights: list[Weight]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(_SEED)
    tensors = {}
    for name, shape, scale in weights:
        values = np.full(shape, scale) if len(shape) == 1 else random.standard_normal(shape) * scale
        tensors[name] = values.astype(np.float32)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    for each in get_args(Kind):
        build(each, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
