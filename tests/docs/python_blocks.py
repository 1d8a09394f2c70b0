"""The Python of the documentation that needs more than a model, or cannot be run.

Each block is executed as printed, in the order of its page and with the names of the blocks before
it, on one rank. Beside them it finds `torch`, `bagua_client`, `model` (plain, a new one for each
block), `optimizer`, `loss` and `train_one_step`. To add one that needs something else: one entry in
BEFORE. To add one that cannot be run here: one entry in COMPILED, with the reason.
"""

from __future__ import annotations

# What is executed before the block: the page, how the block begins, and the code.
BEFORE: tuple[tuple[str, str, str], ...] = (
    (
        "docs/algorithms.md",
        "model.algorithm.abort(model, average=True)",
        'model = DistributedDataParallel(model, algorithm="async"); train_one_step(model)',
    ),
    ("docs/algorithms.md", "model.report_loss(loss)", "model = DistributedDataParallel(model)"),
    (
        "docs/algorithms.md",
        'if model.algorithm.name == "async"',
        'model = DistributedDataParallel(model, algorithm="async"); train_one_step(model)',
    ),
    (
        "docs/data.md",
        "for batch, lengths in",
        "model = bagua_client.DistributedDataParallel(model); rows = torch.zeros(2, 8); "
        "loader = [(rows, torch.tensor([3, 5]))]",
    ),
    (
        "docs/launching.md",
        "model = bagua_client.tune(model)",
        "model = torch.nn.parallel.DistributedDataParallel(model)",
    ),
    ("docs/launching.md", "class Tuned(transformers", "import transformers"),
    ("docs/launching.md", "class Tuned(lightning", "import lightning"),
    (
        "docs/sharded.md",
        "for block in model.blocks:",
        "from torch.distributed.fsdp import fully_shard; model.blocks = torch.nn.ModuleList()",
    ),
    (
        "docs/settings.md",
        "with model.unmeasured():",
        "model = bagua_client.DistributedDataParallel(model); validate = lambda model: None",
    ),
)

# Blocks that are only compiled: the page, how the block begins, and why.
COMPILED: tuple[tuple[str, str, str], ...] = (
    ("docs/extending.md", "# test_grid.py", "a file; tests/docs/test_first_changes.py"),
    ("docs/extending.md", "# test_halving.py", "a file; tests/docs/test_first_changes.py"),
    ("docs/testbed.md", "from pathlib import Path", "root; tests/benchmarks/testbed"),
    ("docs/launching.md", "from bagua_client.launcher", "replaces torch's class for what follows"),
    ("docs/launching.md", "model, optimizer, loader", "tests/integrations/scripts"),
    ("docs/deepspeed.md", "engine, optimizer", "deepspeed; in tests/integrations/scripts"),
    ("docs/deepspeed.md", "engine.reconfigure(", "deepspeed; tests/client/zero"),
    ("docs/lightning.md", "import lightning as L", "4 GPUs; tests/integrations/test_frameworks.py"),
    ("docs/lightning.md", "with fabric.strategy.paused", "tests/integrations"),
    (
        "docs/results.md",
        "bagua_client.on_tuned(",
        "three libraries; tests/client/test_results_page.py",
    ),
    ("docs/results.md", "import json", "a finished job; tests/client/test_callbacks.py"),
)
