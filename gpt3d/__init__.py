"""gpt3d: GPT pretraining in every layout of tensor, pipeline and data parallelism with DeepSpeed ZeRO."""

__version__ = "0.1.0"
