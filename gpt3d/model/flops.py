"""Parameters and FLOPs of a model, from its shape alone. Pure Python: no torch needed."""

from __future__ import annotations

from gpt3d.config.arithmetic import num_microbatches, stage_layers
from gpt3d.config.schema import ModelConfig, RunConfig


def norm_parameters(model: ModelConfig) -> int:
    """One norm: a weight, and with LayerNorm a bias."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _matrices(model: ModelConfig) -> tuple[int, int]:
    """Weights of (attention, MLP) matrices of one layer, without biases."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    gates = 2 if model.activation == "swiglu" else 1
    return (
        model.hidden_size * (query + 2 * kv) + query * model.hidden_size,
        (gates + 1) * model.hidden_size * model.ffn_hidden_size,
    )


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one layer on one tensor-parallel rank: norms and row biases are whole, KV heads at least one."""
    h = model.hidden_size
    query = model.num_heads * model.head_dim // tp
    kv = max(model.num_kv_heads // tp, 1) * model.head_dim
    up = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size // tp
    weights = h * (query + 2 * kv) + query * h + up * h + model.ffn_hidden_size // tp * h
    biases = (query + 2 * kv) + up + 2 * h if model.bias else 0
    return weights + biases + 2 * norm_parameters(model)


def parameter_table(model: ModelConfig, padded: bool = False) -> dict[str, int]:
    """Parameters of the whole model by part; `padded` counts the rows that padding the vocabulary adds."""
    h, layers = model.hidden_size, model.num_layers
    rows = model.padded_vocab_size if padded else model.vocab_size
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention, mlp = _matrices(model)
    if model.bias:
        attention += query + 2 * kv + h
        mlp += (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size + h
    return {
        "embedding": rows * h,
        "positions": model.max_seq_len * h if model.position == "learned" else 0,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norms": (2 * layers + 1) * norm_parameters(model),
        "output": 0 if model.tied_embeddings else rows * h,
    }


def parameter_count(model: ModelConfig, padded: bool = False) -> int:
    """Parameters of the whole model, each counted once (a tied output layer is the embedding)."""
    return sum(parameter_table(model, padded).values())


def _layer_flops_per_token(model: ModelConfig, seq_len: int, causal_half: bool) -> tuple[int, int]:
    """Forward FLOPs per token of all layers: (matrices, the two attention products)."""
    attention = 4 * seq_len * model.num_heads * model.head_dim
    return model.num_layers * 2 * sum(_matrices(model)), model.num_layers * attention // (2 if causal_half else 1)


def model_flops_per_token(model: ModelConfig, seq_len: int, causal_half: bool = False) -> int:
    """FLOPs per token that training needs, forward and backward: the numerator of MFU, equal in every layout.

    3 passes (forward, two backward) x 2 (multiply, add) x matrix weights, the output layer included and the embedding
    look-up not, plus both attention products: 72 L h^2 (1 + s/6h + V/12Lh) for a GPT (Narayanan et al. 2021, eq. 3).
    They count the full attention square; `causal_half` counts only what a causal mask leaves.
    """
    matrices, attention = _layer_flops_per_token(model, seq_len, causal_half)
    return 3 * (matrices + attention + 2 * model.hidden_size * model.vocab_size)


def hardware_flops_per_token(model: ModelConfig, seq_len: int, recompute: str, causal_half: bool = False) -> int:
    """FLOPs per token that are executed: model FLOPs and what recompute does again (the numerator of HFU).

    full: one more forward of every layer (96 L h^2 (1 + s/6h + V/16Lh)); selective: the attention products once more.
    """
    matrices, attention = _layer_flops_per_token(model, seq_len, causal_half)
    again = {"none": 0, "selective": attention, "full": matrices + attention}[recompute]
    return model_flops_per_token(model, seq_len, causal_half) + again


def executed_flops_per_token(model: ModelConfig, seq_len: int, tp: int, recompute: str) -> dict[str, dict[str, int]]:
    """FLOPs per token that one tensor-parallel rank executes: module -> pass -> FLOPs; of the layers' modules in one
    layer, and of "head".

    As torch's FLOP counter counts: matrix products only, the full attention square, and a fused attention backward of
    five products, since the kernel computes the scores again. Key/value heads that several ranks copy and padding rows
    of the vocabulary count.
    """
    h, gates = model.hidden_size, 2 if model.activation == "swiglu" else 1
    query, kv = model.num_heads * model.head_dim // tp, max(model.num_kv_heads // tp, 1) * model.head_dim
    inner = model.ffn_hidden_size // tp
    forward = {
        "attention.qkv": 2 * h * (query + 2 * kv),
        "attention core": 4 * seq_len * query,
        "attention.out": 2 * h * query,
        "mlp.gate_up" if gates == 2 else "mlp.up": 2 * h * gates * inner,
        "mlp.down": 2 * h * inner,
        "head": 2 * h * (model.padded_vocab_size // tp),
    }
    table = {}
    for name, flops in forward.items():
        again = (recompute == "full" and name != "head") or (recompute == "selective" and name == "attention core")
        backward = flops * 5 // 2 if name == "attention core" else 2 * flops
        table[name] = {"forward": flops, "recompute": flops if again else 0, "backward": backward}
    return table


def rank_flops(config: RunConfig, dp: int, stage: int) -> dict[str, dict[str, int]]:
    """FLOPs of one rank of this pipeline stage in one step: module -> pass -> FLOPs. A dry run counts the same."""
    p, layers = config.parallel, stage_layers(config)
    tokens = config.trainer.micro_batch_size * config.data.seq_len * num_microbatches(config, dp)
    own = sum(layers[stage :: p.pp])
    each = executed_flops_per_token(config.model, config.data.seq_len, p.tp, config.recompute)
    if stage < p.pp - 1:
        del each["head"]
    return {
        name: {step: flops * tokens * (1 if name == "head" else own) for step, flops in passes.items() if flops}
        for name, passes in each.items()
    }
