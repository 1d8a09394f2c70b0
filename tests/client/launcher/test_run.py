"""Command lines of Bagua's tutorials run with another name of the module, and nothing else."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from bagua_client import run
from tests.client.launcher.programs import start
from tests.deploy.slurm import free_ports

pytestmark = pytest.mark.slow

TELLS = r"""
import os, sys
of_ours = ("BAGUA_AUTOTUNE", "BAGUA_AUTOTUNE_MAX_SAMPLES", "BAGUA_DEFAULT_BUCKET_SIZE")
names = ("RANK", "WORLD_SIZE", *of_ours, "EXPORTED")
told = [os.environ.get(name) for name in names]
os.write(1, f"told {told} {sys.argv[1:]}\n".encode())  # at once: ranks write to one pipe
"""
TRAINS = r"""
import os, sys
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
os.write(1, f"trains with {DDP(Linear(2, 2)).configuration} {sys.argv[1:]}\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "your_training_script.py").write_text(TELLS)
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "your_bash_script.sh").write_text(f'{sys.executable} train.py "$@"')
    return tmp_path


def _run(command: str, folder: Path) -> list[str]:
    """The last two lines that begin as the scripts' do, sorted."""
    done = start("-m", "bagua_client.run", *command.split(), folder=folder)
    assert done.returncode == 0, done.stderr
    found = re.findall("(?:told|trains) .*", done.stdout)
    return sorted(found) + re.findall("bagua-run: .*", done.stderr)


def test_ranks_of_one_node_are_told_what_the_flags_say(folder: Path) -> None:
    command = "--nproc_per_node=2 --autotune_level 1 --autotune_max_samples 9 --enable_bagua_net"
    command += " -x EXPORTED=yes --set_additional_flag --use_env your_training_script.py --arg1 --b"
    zero, one, line = _run(command, folder)
    assert zero == "told ['0', '2', '1', '9', None, 'yes'] ['--local_rank=0', '--arg1', '--b']"
    assert one == "told ['1', '2', '1', '9', None, 'yes'] ['--local_rank=1', '--arg1', '--b']"
    assert "--enable_bagua_net is not needed" in line


def test_a_bash_script_trains_with_our_class(folder: Path) -> None:
    command = f"--no_python --nproc_per_node=2 --master_port={free_ports(1)[0]}"
    lines = _run(f"{command} bash your_bash_script.sh --arg1", folder)
    assert lines == ["trains with bucket 25 MiB, first bucket 1 MiB ['--arg1']"] * 2


def test_two_nodes_find_one_another(folder: Path) -> None:
    common = (
        f"--nproc_per_node=1 --nnodes=2 --master_addr=127.0.0.1 --master_port={free_ports(1)[0]}"
    )
    common += " --default_bucket_size 2097152 --host_list a,b"
    commands = [f"{common} --node_rank={rank} your_training_script.py" for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        nodes = list(threads.map(lambda command: _run(command, folder), commands))
    told = "None, None, '2097152', None] []"
    assert sorted(nodes) == [[f"told ['{rank}', '2', {told}"] for rank in range(2)]


def test_an_elastic_job_meets_over_c10d_and_writes_its_logs(folder: Path) -> None:
    command = "--nnodes=1:4 --nproc_per_node=2 --rdzv_id=7 --rdzv_backend=c10d"
    command += " --rdzv_endpoint=localhost:0 --rdzv_conf=last_call_timeout=1 --logdir=logs"
    assert _run(f"{command} your_training_script.py", folder) == []
    logged = [file.read_text() for file in sorted((folder / "logs").rglob("stdout.log"))]
    assert [text[:16] for text in logged] == ["told ['0', '2', ", "told ['1', '2', "]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--host_list h1:22,h2 train.py", "--nnodes 2 --node-rank K --master-addr h1"),
        ("--autotune_max_samples 501 train.py", "BAGUA_AUTOTUNE_MAX_SAMPLES must be"),
        ("--no_such_flag train.py", "unrecognized arguments: --no_such_flag"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_one_line(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as end:
        run.main(command.split())
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
