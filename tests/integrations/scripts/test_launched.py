"""Scripts that know nothing of us, started by the launcher, have the losses that they have without.

The same processes serve all ways to train of a script.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.launcher.programs import start
from tests.integrations.arms import needs
from tests.torchrun import WORDS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "stock_script.py")
WAYS = ["plain", "view", "static", "unused", "accumulated", "half"]
LAUNCHER = "-m", "bagua_client"
FEWEST_CUTS = 3


def _losses(folder: Path, *words: str) -> list[dict[str, list[float]]]:
    """What the script told on both ranks, where python is given ``words``."""
    folder.mkdir()
    done = start(*words, str(folder), *WAYS, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def without_us(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    return _losses(tmp_path_factory.mktemp("without us") / "told", *WORDS, SCRIPT)


def test_sizes_that_change_every_5_steps_change_no_loss_by_a_bit(
    without_us: list[dict[str, list[float]]], tmp_path: Path
) -> None:
    folder = tmp_path / "swapped"
    swapped = _losses(folder, *LAUNCHER, *WORDS, str(HERE / "swapping.py"), SCRIPT)
    assert swapped == without_us, "not the losses of torch's class"
    assert without_us[0]["plain"] != without_us[1]["plain"], "the ranks train with the same data"
    for rank in range(2):
        cuts = json.loads((folder / f"cuts-{rank}.json").read_text())
        assert [len(found) >= FEWEST_CUTS for found in cuts] == [True] * len(WAYS), cuts


LIGHTNING = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layers(batch), 2 * batch[:, :3])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

folder, strategy = sys.argv[1:]
quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_checkpointing")}
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=20, **quiet)
module = Module()
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
trainer.fit(module, DataLoader(data, batch_size=4))
weights = [value.tolist() for value in module.state_dict().values()]
with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
    json.dump(weights, file)
"""
FAILING = str(HERE / "failing_look.py")


def _told(folder: Path, *words: str) -> tuple[list[str], str]:
    """What both ranks wrote into the folder, and all that was printed."""
    folder.mkdir()
    words = tuple(str(folder) if word == "FOLDER" else word for word in words)
    done = start(*words, folder=ROOT)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    return [(folder / f"{rank}.json").read_text() for rank in range(2)], printed


def _told_where_it_fails(folder: Path, look: str, *words: str) -> list[str]:
    """What both ranks wrote; the look failed on rank 1, and a line says so."""
    ours = *LAUNCHER, "--autotune", *WORDS, FAILING, f"bagua_client.{look}"
    told, printed = _told(folder, *ours, *words)
    assert "a look fails" in printed
    (line,) = [line for line in printed.splitlines() if "autotune is off" in line]
    assert "on rank 1" in line
    assert "it fails on purpose" in line
    return told


def test_a_look_that_fails_on_a_rank_changes_nothing_and_is_one_line(
    without_us: list[dict[str, list[float]]], tmp_path: Path
) -> None:
    look = "measuring.rank_measurement:StepBoundary.__init__"
    told = _told_where_it_fails(tmp_path / "ours", look, SCRIPT, "FOLDER", "plain")
    assert [json.loads(each) for each in told] == [{"plain": each["plain"]} for each in without_us]


@needs("lightning")
def test_a_look_that_fails_changes_no_fit_of_lightnings(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(LIGHTNING)
    words = [str(tmp_path / "fit.py"), "FOLDER", "ddp"]
    stock, _ = _told(tmp_path / "stock", *WORDS, *words)
    assert _told_where_it_fails(tmp_path / "ours", "tunable.offer:Offer.reasons", *words) == stock


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
