"""What a run says at its start and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt3d.config.arithmetic import World
from gpt3d.config.notes import batch_in_words, notes
from gpt3d.config.schema import RunConfig
from gpt3d.model.flops import parameter_count
from gpt3d.parallel.device import Device
from gpt3d.parallel.layout import Layout
from gpt3d.tracking.metrics import perplexity
from gpt3d.tracking.sinks import clock, short


def banner(config: RunConfig, layout: Layout, device: Device, data: str, rank_parameters: int) -> str:
    """The start of a run in a few lines: model, layout, batch, data, and what to know about the settings."""
    sizes, p = layout.sizes, config.precision
    sequence_parallel = " with sequence parallelism" if layout.sequence_parallel else ""
    grads = "" if p.dtype == "fp32" else f", gradients accumulated in {p.grad_dtype}"
    zero = f"ZeRO-{config.zero.stage}" + (" with offload" if config.zero.offload_optimizer != "none" else "")
    tokens = config.trainer.steps * config.trainer.global_batch_size * config.data.seq_len
    lines = [
        f"model   {config.model.name}: {parameter_count(config.model):,} parameters, {rank_parameters:,} on this rank",
        f"layout  {sizes.world} ranks = TP {sizes.tp} x PP {sizes.pp} x DP {sizes.dp}{sequence_parallel}, {zero}, "
        f"{p.dtype}{grads}, {device.kind} over {device.backend}",
        f"batch   {batch_in_words(config, sizes.dp)}",
        f"length  {config.trainer.steps:,} steps, {short(tokens)} tokens",
        f"data    {data}",
        f"run     {config.run_dir}",
        *(f"note    {note}" for note in notes(config, World(ranks=sizes.world, device=device.kind))),
    ]
    return "\n".join(lines)


def summary(config: RunConfig, results: dict[str, Any], text: str | None, run_dir: Path) -> str:
    """The end of a run: what was reached, a sample, and what to try next."""
    lines = [
        "",
        f"done    {results['steps']:,} steps in {clock(results['seconds'])}, {results['tokens_per_s']:,.0f} tokens/s",
    ]
    loss, entropy = results["validation_loss"], results["unigram_entropy"]
    if loss is not None:
        lines.append(f"loss    validation {loss:.4f} nats a token, perplexity {perplexity(loss):,.2f}")
    if loss is not None and entropy is not None:
        than = "below" if loss < entropy else "not below"
        lines.append(
            f"        {than} the unigram entropy of the text, {entropy:.4f}: what word frequencies alone can give"
        )
    if text is not None:
        lines += ["sample", *("        " + line for line in text.strip("\n").split("\n"))]
    lines += [
        f"files   {run_dir / 'metrics.jsonl'} and config.yaml beside it",
        "next    python -m gpt3d.train trainer.steps=2000                     train for longer",
        "        python -m gpt3d.train parallel=tp2_pp2 zero=0                another layout, the same losses",
        "        python -m gpt3d.train -m optimizer.lr=1e-3,3e-3 trainer.steps=100   a sweep",
        "        python -m gpt3d.train model=70b parallel=tp8_pp2 cluster=h100       what would a 70B model need?",
    ]
    return "\n".join(lines)
