"""The typed configuration: one dataclass a config group, one tree for a run.

No torch import here: `--help`, `--cfg` and tab completion must stay fast. OmegaConf checks types and unknown keys while
Hydra composes; the limits in each field's metadata (`choices`, `low`, `high`) and the rules that involve several keys
are checked together by `gpt3d.config.rules`. The meaning of each key stands beside its default in `conf/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Optional, get_args, get_type_hints

from omegaconf import MISSING

MOST_SEED = 2**63 - 1

# ruff: noqa: UP045  (OmegaConf reads Optional[...] from the annotations)


def one_of(*choices: str, default: Any = MISSING) -> Any:
    """A text field that accepts only `choices`."""
    return field(default=default, metadata={"choices": choices})


def number(default: Any = MISSING, low: float | None = None, high: float | None = None) -> Any:
    """A numeric field with inclusive limits."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass
class RopeScalingConfig:
    """Llama 3.1 frequency scaling of rotary embeddings; `factor` 1 leaves the frequencies as they are."""

    factor: float = number(1.0, low=1.0)
    low_freq_factor: float = number(1.0, low=0.0)
    high_freq_factor: float = number(4.0, low=0.0)
    original_max_seq_len: int = number(8192, low=1)


@dataclass
class ModelConfig:
    """Shape of the transformer. One option per published size in `conf/model/`."""

    name: str = MISSING
    num_layers: int = number(low=1)
    hidden_size: int = number(low=1)
    num_heads: int = number(low=1)
    num_kv_heads: int = number(low=1)
    head_dim: int = number(low=1)
    ffn_hidden_size: int = number(low=1)
    vocab_size: int = number(low=2)
    vocab_multiple: int = number(128, low=1)
    max_seq_len: int = number(low=1)
    position: str = one_of("learned", "rope")
    norm: str = one_of("layernorm", "rmsnorm")
    norm_eps: float = number(1e-5, low=0.0)
    activation: str = one_of("gelu", "swiglu")
    bias: bool = MISSING
    tied_embeddings: bool = MISSING
    hidden_dropout: float = number(0.0, low=0.0, high=0.99)
    attention_dropout: float = number(0.0, low=0.0, high=0.99)
    init_std: float = number(0.02, low=0.0)
    rope_theta: float = number(500000.0, low=1.0)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`, whatever the layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass
class ParallelConfig:
    """Sizes of the axes. `dp: null` means: what remains of the world."""

    tp: int = number(1, low=1)
    cp: int = number(1, low=1)
    pp: int = number(1, low=1)
    dp: Optional[int] = number(None, low=1)
    sequence_parallel: bool = False
    allow_cross_node_tp: bool = False
    layers_per_stage: Optional[list[int]] = None
    allow_uneven_stages: bool = False
    embedding_layers: float = number(0.0, low=0.0)
    head_layers: float = number(0.0, low=0.0)


@dataclass
class PipelineConfig:
    """Which schedule runs the microbatches through the stages."""

    schedule: str = one_of("gpipe", "1f1b", "interleaved", "zb_h1", default="1f1b")
    chunks: int = number(1, low=1)


@dataclass
class ZeroConfig:
    """DeepSpeed ZeRO over the data-parallel ranks."""

    stage: int = number(low=0, high=3)
    offload_optimizer: str = one_of("none", "cpu", default="none")
    offload_param: str = one_of("none", "cpu", default="none")
    pin_memory: bool = True
    overlap_comm: bool = True
    contiguous_gradients: bool = True
    reduce_bucket_size: int = number(500_000_000, low=1)
    allgather_bucket_size: int = number(500_000_000, low=1)
    prefetch_bucket_size: int = number(500_000_000, low=0)
    param_persistence_threshold: int = number(100_000, low=0)
    max_live_parameters: int = number(1_000_000_000, low=1)
    max_reuse_distance: int = number(1_000_000_000, low=0)
    deepspeed: dict[str, Any] = field(default_factory=dict)


@dataclass
class PrecisionConfig:
    """Number formats: of parameters and compute, and of the gradient accumulator."""

    dtype: str = one_of("fp32", "bf16", "fp16")
    grad_dtype: str = one_of("fp32", "bf16", "fp16", default="fp32")
    initial_loss_scale: float = number(65536.0, low=1.0)
    loss_scale_window: int = number(1000, low=1)
    min_loss_scale: float = number(1.0, low=2**-14)
    max_skipped_steps: int = number(50, low=1)


@dataclass
class OptimizerConfig:
    """AdamW. No decay on norms and biases."""

    name: str = one_of("adamw", "cpu_adamw", default="adamw")
    lr: float = number(low=0.0)
    beta1: float = number(0.9, low=0.0, high=0.999999)
    beta2: float = number(0.95, low=0.0, high=0.999999)
    eps: float = number(1e-8, low=1e-30)  # padding rows have moments of 0
    weight_decay: float = number(0.1, low=0.0)
    grad_clip: float = number(1.0, low=0.0)


@dataclass
class LrConfig:
    """Shape of the learning-rate curve; the peak is `optimizer.lr`."""

    schedule: str = one_of("constant", "linear", "cosine", "wsd")
    warmup_steps: int = number(0, low=0)
    decay_steps: Optional[int] = number(None, low=1)
    min_ratio: float = number(0.1, low=0.0, high=1.0)


@dataclass
class HfConfig:
    """Arguments of `datasets.load_dataset`; `streaming` trains from the stream without preparing it."""

    path: Optional[str] = None
    name: Optional[str] = None
    split: str = "train"
    revision: Optional[str] = None
    data_files: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    streaming: bool = False
    streams: int = number(64, low=1)
    validation_tokens: int = number(1_000_000, low=2)


@dataclass
class SourceConfig:
    """One corpus: where its text is, and how documents become tokens on disk."""

    source: str = one_of("shakespeare", "stdlib", "synthetic", "files", "hf", "tokens", "blend")
    paths: list[str] = field(default_factory=list)
    validation_paths: list[str] = field(default_factory=list)
    text_column: str = "text"
    txt_documents: str = one_of("file", "line", default="file")
    token_dtype: str = one_of("uint8", "uint16", "int32", "uint32", default="uint16")
    on_error: str = one_of("raise", "skip", "replace", default="raise")
    deduplicate: bool = False
    shuffle_documents: bool = False
    hf: HfConfig = field(default_factory=HfConfig)


@dataclass
class DataConfig(SourceConfig):
    """The text of a run and how it is cut. `blend` holds, by name, `weight` and the SourceConfig keys of each part."""

    seq_len: int = number(low=1)
    seed: int = number(0, low=0, high=MOST_SEED)
    validation_fraction: float = number(0.05, low=0.0, high=0.9)
    packing: str = one_of("concat", "best_fit", default="concat")
    document_masks: bool = False
    blend: dict[str, Any] = field(default_factory=dict)
    workers: Optional[int] = number(None, low=1)
    cache_dir: Optional[str] = None


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    kind: str = one_of("bytes", "shakespeare_bpe", "gpt2", "hf", "trained")
    path: Optional[str] = None
    revision: Optional[str] = None
    eod_token: Optional[str] = None
    vocab_size: int = number(8192, low=258)
    train_bytes: int = number(100_000_000, low=1)


@dataclass
class ClusterConfig:
    """The machines: how many, and what is in each."""

    name: str = MISSING
    nodes: int = number(1, low=1)
    gpus_per_node: Optional[int] = number(None, low=1)
    device: str = one_of("auto", "cuda", "cpu", default="auto")
    gpu: Optional[str] = None
    gpu_memory_gb: Optional[float] = number(None, low=0.0)
    peak_tflops: Optional[float] = number(None, low=0.0)
    intra_node_gb_per_s: Optional[float] = number(None, low=0.0)
    inter_node_gb_per_s: Optional[float] = number(None, low=0.0)
    host_memory_gb: Optional[float] = number(None, low=0.0)
    timeout_minutes: float = number(10.0, low=0.01)
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class CheckpointConfig:
    """When the run is saved, and what it starts from."""

    interval: int = number(0, low=0)
    final: bool = True
    on_signal: bool = True
    signal_seconds: float = number(120.0, low=0.0)
    background: bool = True
    keep_last: int = number(2, low=1)
    keep_every: int = number(0, low=0)
    resume: str = "none"
    verify: str = one_of("full", "sample", "off", default="full")
    accept_changes: list[str] = field(default_factory=list)


@dataclass
class WandbConfig:
    """One run at Weights & Biases; the rest is wandb's own environment variables (WANDB_API_KEY, WANDB_BASE_URL)."""

    mode: str = one_of("disabled", "online", "offline", default="disabled")
    project: str = "gpt3d"
    entity: Optional[str] = None
    name: Optional[str] = None
    group: Optional[str] = None
    job_type: Optional[str] = None
    tags: list[str] = field(default_factory=list)
    fork: bool = False
    start_seconds: float = number(30.0, low=1.0)


@dataclass
class TrackingConfig:
    """How progress is shown. `metrics.jsonl` is always written."""

    log_interval: int = number(10, low=1)
    progress_bar: bool = True
    finish_seconds: float = number(30.0, low=1.0)
    report: bool = True
    layer_norms_interval: int = number(0, low=0)
    node_metrics: bool = False
    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class TrainerConfig:
    """Length of the run and the batch. These are the only batch sizes: DeepSpeed's are derived."""

    steps: int = number(low=0)
    global_batch_size: int = number(low=1)
    micro_batch_size: int = number(low=1)
    eval_interval: int = number(0, low=0)
    eval_batches: int = number(8, low=1)
    sample_tokens: int = number(0, low=0)
    sample_prompt: str = ""
    copy_check_interval: int = number(0, low=0)
    timeline: bool = False
    timeline_steps: int = number(3, low=1)


@dataclass
class DebugConfig:
    """Aids for finding faults; all off in a normal run."""

    fault: str = one_of("none", "error", "kill", "hang", default="none")
    fault_rank: int = number(0, low=0)
    fault_step: int = number(0, low=0)
    repeat_batch: bool = False
    find_nan: bool = False
    profile: bool = False
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    profile_first_step: int = number(3, low=1)
    profile_steps: int = number(2, low=1)
    deterministic: bool = False


@dataclass
class RunConfig:
    """One run: what Hydra composes, what every rank gets, and what is saved beside the results."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr: LrConfig = field(default_factory=LrConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    recompute: str = one_of("none", "selective", "full", default="none")
    seed: int = number(1234, low=0, high=MOST_SEED)
    init_from: Optional[str] = None
    objective: str = one_of("validation_loss", "tokens_per_s", default="validation_loss")
    run_name: str = MISSING
    run_dir: Optional[str] = None
    allow_oom: bool = False
    search: bool = False
    plan_tokens: Optional[float] = number(None, low=1.0)
    plan_json: Optional[str] = None
    dry_run: bool = False
    rank: Optional[int] = number(None, low=0)
    plan_pictures: Optional[str] = None


@dataclass(frozen=True)
class Leaf:
    """One key of the schema: its dotted name, annotated type, and metadata (`choices`, `low`, `high`)."""

    key: str
    type: Any
    metadata: Mapping[str, Any]

    @property
    def is_text(self) -> bool:
        return self.type is str or (str in get_args(self.type) and not self.is_open)

    @property
    def is_optional(self) -> bool:
        return type(None) in get_args(self.type)

    @property
    def is_open(self) -> bool:
        """A dictionary whose keys are the user's."""
        return getattr(self.type, "__origin__", None) is dict


@cache
def leaves() -> tuple[Leaf, ...]:
    """Every key of the schema, in order."""
    return tuple(_walk(RunConfig, ""))


def _walk(cls: type, prefix: str) -> Iterator[Leaf]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        key, hint = prefix + item.name, hints[item.name]
        if is_dataclass(hint):
            yield from _walk(hint, key + ".")  # type: ignore[arg-type]
        else:
            yield Leaf(key, hint, item.metadata)
