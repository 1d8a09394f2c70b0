"""The functions of Bagua's compiled core that scripts call, in a process that was started
``--as-bagua``."""

from __future__ import annotations

from importlib import metadata

import torch

from bagua_compat import __version__


def show_version() -> None:
    """Print what carries the communication."""
    try:
        version = metadata.version("bagua-autotune")
    except metadata.PackageNotFoundError:
        version = "from a source tree"
    print(f"bagua_client {version}, with Bagua {__version__}'s interface")
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'not used'}")


def install_deps() -> None:
    """Bagua downloads NCCL here; PyTorch brings its own, so there is nothing to install."""
    print("bagua_client needs nothing beyond PyTorch, which brings its own NCCL")
