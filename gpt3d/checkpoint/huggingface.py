"""The same model in Hugging Face's words: which tensor is which part of ours, and config.json both ways.

Llama (`LlamaForCausalLM`): ours with queries, keys and values, gate and up as tensors of their own; the rotary
convention (dims i and i + d/2 turn together) is the same. GPT-2 (`GPT2LMHeadModel`): matrices are stored [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt3d.config.schema import ModelConfig

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
PREFIX = {LLAMA: "model.", GPT2: "transformer."}  # of all names but that of the head
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # stored by old versions, and no weights


class NoEquivalent(ValueError):
    """Hugging Face has no class for this model, or we none for theirs."""

    show_traceback = False


@dataclass(frozen=True)
class Part:
    """Rows start..stop of our tensor `name`; `transposed`: stored the other way round."""

    name: str
    start: int
    stop: int
    transposed: bool = False


def architecture(model: ModelConfig) -> str:
    """The Hugging Face class of this model. Raises NoEquivalent."""
    family = (model.position, model.norm, model.activation)
    if family == ("rope", "rmsnorm", "swiglu"):
        return LLAMA
    plain_heads = model.num_kv_heads == model.num_heads and model.num_heads * model.head_dim == model.hidden_size
    if family == ("learned", "layernorm", "gelu") and model.bias and plain_heads:
        return GPT2
    raise NoEquivalent(
        f"no Hugging Face class has position={model.position}, norm={model.norm}, activation={model.activation}, "
        f"bias={model.bias} and {model.num_kv_heads} key/value heads: {LLAMA} is rope + rmsnorm + swiglu, {GPT2} is "
        "learned + layernorm + gelu with biases and as many key/value heads as heads"
    )


def parts(model: ModelConfig) -> dict[str, Part]:
    """Their tensors, in file order, as parts of ours (of the true vocabulary, without padding)."""
    return _llama_parts(model) if architecture(model) == LLAMA else _gpt2_parts(model)


def shape_of(part: Part, model: ModelConfig) -> tuple[int, ...]:
    """Their shape of a part."""
    rows, h = part.stop - part.start, model.hidden_size
    if part.name.endswith("bias") or "norm" in part.name:
        return (rows,)
    inner = {"attention.out.weight": model.num_heads * model.head_dim, "mlp.down.weight": model.ffn_hidden_size}
    columns = next((size for end, size in inner.items() if part.name.endswith(end)), h)
    return (columns, rows) if part.transposed else (rows, columns)


def _llama_parts(model: ModelConfig) -> dict[str, Part]:
    h, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    f = model.ffn_hidden_size
    kinds = ("weight", "bias") if model.bias else ("weight",)
    found = {"model.embed_tokens.weight": Part("embedding.word.weight", 0, model.vocab_size)}
    for i in range(model.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        for kind in kinds:
            fused = {
                "self_attn.q_proj": ("attention.qkv", 0, q),
                "self_attn.k_proj": ("attention.qkv", q, q + kv),
                "self_attn.v_proj": ("attention.qkv", q + kv, q + 2 * kv),
                "self_attn.o_proj": ("attention.out", 0, h),
                "mlp.gate_proj": ("mlp.gate_up", 0, f),
                "mlp.up_proj": ("mlp.gate_up", f, 2 * f),
                "mlp.down_proj": ("mlp.down", 0, h),
            }
            for name, (own, start, stop) in fused.items():
                found[f"{theirs}.{name}.{kind}"] = Part(f"{ours}.{own}.{kind}", start, stop)
        found[f"{theirs}.input_layernorm.weight"] = Part(f"{ours}.attention_norm.weight", 0, h)
        found[f"{theirs}.post_attention_layernorm.weight"] = Part(f"{ours}.mlp_norm.weight", 0, h)
    found["model.norm.weight"] = Part("final_norm.weight", 0, h)
    if not model.tied_embeddings:
        found["lm_head.weight"] = Part("head.weight", 0, model.vocab_size)
    return found


def _gpt2_parts(model: ModelConfig) -> dict[str, Part]:
    h, f = model.hidden_size, model.ffn_hidden_size
    found = {
        "transformer.wte.weight": Part("embedding.word.weight", 0, model.vocab_size),
        "transformer.wpe.weight": Part("embedding.position.weight", 0, model.max_seq_len),
    }
    for i in range(model.num_layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        linear = {"attn.c_attn": ("attention.qkv", 3 * h), "attn.c_proj": ("attention.out", h),
                  "mlp.c_fc": ("mlp.up", f), "mlp.c_proj": ("mlp.down", h)}  # fmt: skip
        for kind in ("weight", "bias"):
            found[f"{theirs}.ln_1.{kind}"] = Part(f"{ours}.attention_norm.{kind}", 0, h)
            found[f"{theirs}.ln_2.{kind}"] = Part(f"{ours}.mlp_norm.{kind}", 0, h)
            for name, (own, rows) in linear.items():
                found[f"{theirs}.{name}.{kind}"] = Part(f"{ours}.{own}.{kind}", 0, rows, kind == "weight")
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = Part(f"final_norm.{kind}", 0, h)
    if not model.tied_embeddings:
        found["lm_head.weight"] = Part("head.weight", 0, model.vocab_size)
    return found


def to_config(model: ModelConfig, dtype: str, eod: int) -> dict[str, Any]:
    """config.json. Rope and dtype stand in it in the words of version 5 of transformers and of version 4."""
    common = {
        "architectures": [architecture(model)],
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return common | (_llama_config(model) if architecture(model) == LLAMA else _gpt2_config(model))


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling.factor != 1.0:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if scaling.factor != 1.0 else None,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
    }


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "scale_attn_weights": True,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our model settings of a config.json, by the names of ModelConfig. Raises NoEquivalent."""
    names: list[str] = config.get("architectures") or [str(config.get("model_type"))]
    if names[0] in (LLAMA, "llama"):
        found = _from_llama(config)
    elif names[0] in (GPT2, "gpt2"):
        found = _from_gpt2(config)
    else:
        raise NoEquivalent(f"{names[0]} cannot be read; {LLAMA} and {GPT2} can")
    return found | {"vocab_size": config["vocab_size"]}


def _from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise NoEquivalent(f"rotary scaling of the kind {kind} cannot be read; default and llama3 can")
    bias = bool(config.get("attention_bias", False))
    if bias != bool(config.get("mlp_bias", False)) or config.get("hidden_act", "silu") != "silu":
        raise NoEquivalent("biases in some linear layers only, or another activation than silu, cannot be read")
    heads = config["num_attention_heads"]
    found = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "position": "rope",
        "norm": "rmsnorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope_scaling.factor": 1.0,
    }
    if kind == "llama3":
        found |= {
            "rope_scaling.factor": float(rope["factor"]),
            "rope_scaling.low_freq_factor": float(rope["low_freq_factor"]),
            "rope_scaling.high_freq_factor": float(rope["high_freq_factor"]),
            "rope_scaling.original_max_seq_len": rope["original_max_position_embeddings"],
        }
    return found


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    h, heads = config["n_embd"], config["n_head"]
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh") or config.get("scale_attn_by_inverse_layer_idx"):
        raise NoEquivalent(f"activation {activation} or scores scaled by layer cannot be read; gelu_new can")
    return {
        "num_layers": config["n_layer"],
        "hidden_size": h,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "ffn_hidden_size": config.get("n_inner") or 4 * h,
        "max_seq_len": config["n_positions"],
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
    }
