"""Checkpoints in Bagua's files."""

from bagua_client.compat.torch_api.checkpoint.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
