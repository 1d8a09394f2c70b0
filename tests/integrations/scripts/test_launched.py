"""A script that Accelerate's own launcher starts, with ours in between. (That a class under
torch's name changes no loss, however buckets are cut, is in test_frameworks.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.launcher.programs import start
from tests.integrations.lacking import needs

pytestmark = pytest.mark.slow


ACCELERATE = """
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
for megabytes in (None, 25, 10):
    given = [DistributedDataParallelKwargs(bucket_cap_mb=megabytes)] if megabytes else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=given)
    model = accelerator.prepare(nn.Linear(2, 2))
    if accelerator.is_main_process:
        print(megabytes, model.configuration, type(accelerator.unwrap_model(model)).__name__)
accelerator.end_training()
"""


@needs("accelerate")
def test_accelerates_own_launcher_and_the_users_bucket_cap_mb(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCELERATE)
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    options = "--mixed_precision no --dynamo_backend no --main_process_port 0"
    words = f"-m {launch} {options} -m bagua_client train.py".split()
    done = start(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "None bucket 25 MiB, first bucket 1 MiB Linear",
        # Accelerate hands on only what differs from its defaults, and 25 is one.
        "25 bucket 25 MiB, first bucket 1 MiB Linear",
        "10 bucket 10 MiB Linear",
    ]
