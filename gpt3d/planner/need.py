"""What a layout wants, as one short message: for the refusal of a run that does not fit, and for the plan."""

from __future__ import annotations

from collections.abc import Iterator

from gpt3d.config.schema import RunConfig
from gpt3d.planner.memory import RankMemory, size, worst_rank
from gpt3d.planner.table import columns

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "work", "step", "buffers", "margin")


def layout_in_words(config: RunConfig, dp: int) -> str:
    """Model, axes and what decides memory, on one line."""
    p = config.parallel
    pipeline = f" ({config.pipeline.schedule})" if p.pp > 1 else ""
    offload = "" if config.zero.offload_optimizer == config.zero.offload_param == "none" else " with offload"
    return (
        f"{config.model.name} with tp {p.tp}, pp {p.pp}{pipeline}, dp {dp}, {config.precision.dtype}, "
        f"ZeRO {config.zero.stage}{offload}, recompute {config.recompute}"
    )


def describe_need(config: RunConfig, dp: int) -> str:
    """The resolved layout, the GPUs it wants, the memory of the fullest of them part by part, and what would help."""
    need, p = worst_rank(config, dp), config.parallel
    ranks = p.tp * p.cp * p.pp * dp
    rows = [[name, size(value)] for name in PARTS if (value := getattr(need, name))]
    rows.append(["total", size(need.total)])
    if need.host:
        rows.append(["host memory", f"{size(need.host)} a rank"])
    head = f"{layout_in_words(config, dp)} wants {ranks} GPU{'s' if ranks > 1 else ''} of at least {size(need.total)}:"
    helps = "; ".join(what_helps(config, dp, need))
    lines = [head, *columns(rows, " " * 8), *([f"      what would help: {helps}"] if helps else [])]
    return "\n".join(lines)


def what_helps(config: RunConfig, dp: int, need: RankMemory) -> Iterator[str]:
    """Keys that shrink the large parts of `need`, the one that costs least speed first."""
    large = need.total / 20
    if config.precision.dtype == "fp32":
        yield "precision=bf16"
    if config.zero.stage == 0 and need.optimizer > large:
        yield f"zero=1 (divides {size(need.optimizer)} of optimizer states by dp{'' if dp > 1 else ', now 1'})"
    if config.trainer.micro_batch_size > 1 and need.activations + need.logits > large:
        yield "trainer.micro_batch_size=1"
    if config.recompute == "none" and need.activations > large:
        yield "recompute=full"
    if need.state > large:
        yield "more tp (within a node), then more pp"
        if config.zero.stage in (1, 2):
            yield "zero=3, or zero=3_offload"
        elif config.zero.stage == 3 and config.zero.offload_optimizer == "none":
            yield "zero=3_offload"
