"""TensorBoard event files in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt3d.tracking.metrics import Metrics, grouped


class TensorBoardSink:
    """`first_step`: steps done when this start of the run begins; what an earlier start wrote beyond is hidden."""

    def __init__(self, folder: Path, first_step: int, about: Callable[[], Mapping[str, Any]]) -> None:
        from omegaconf import OmegaConf
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        text = OmegaConf.to_yaml(OmegaConf.create(dict(about())))
        self.writer.add_text("run", "".join(f"    {line}\n" for line in text.splitlines()), first_step + 1)

    def log(self, metrics: Metrics) -> None:
        values = grouped(metrics)
        step = values.pop("step")
        for name, value in values.items():
            self.writer.add_scalar(name, value, int(step))
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        self.writer.close()
