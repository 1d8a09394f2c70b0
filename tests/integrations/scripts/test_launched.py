"""Scripts that know nothing of us, started by the launcher, have the losses that they have without.

The same processes serve all ways to train of a script.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.launcher.programs import start
from tests.integrations.lacking import needs

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "stock_script.py")
WAYS = ["plain", "view", "static", "unused", "accumulated", "half"]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
FEWEST_CUTS = 3


def _losses(folder: Path, *words: str) -> list[dict[str, list[float]]]:
    """What the script told on both ranks, where torchrun is given ``words``."""
    folder.mkdir()
    done = start(*TORCHRUN, *words, str(folder), *WAYS, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_sizes_that_change_every_5_steps_change_no_loss_by_a_bit(tmp_path: Path) -> None:
    without_us, folder = _losses(tmp_path / "stock", SCRIPT), tmp_path / "swapped"
    swapped = _losses(folder, "-m", "bagua_client", str(HERE / "swapping.py"), SCRIPT)
    assert swapped == without_us, "not the losses of torch's class"
    assert without_us[0]["plain"] != without_us[1]["plain"], "the ranks train with the same data"
    for rank in range(2):
        cuts = json.loads((folder / f"cuts-{rank}.json").read_text())
        assert [len(found) >= FEWEST_CUTS for found in cuts] == [True] * len(WAYS), cuts


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
