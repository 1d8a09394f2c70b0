"""A script that ``python -m bagua_client`` starts finds everything as ``python`` would have it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client.launcher import job_environment, script
from tests.client.launcher.programs import start
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

SEES = """
import json, os, signal, sys
path = [entry for entry in sys.path]
import helper
seen = {
    "argv": sys.argv, "path": path, "name": __name__, "spec": str(__spec__ and __spec__.name),
    "names": sorted(vars()), "optimize": sys.flags.optimize, "executable": sys.executable,
    "file": __file__, "helper": helper.VALUE, "options": sys.orig_argv[1:2],
    "signals": [str(signal.getsignal(number)) for number in (2, 13, 15)],
}
print(json.dumps(seen))
sys.stdout.flush()
if sys.argv[-1] == "raise":
    raise KeyError("gone")
sys.exit(7)
"""
ARGUMENTS = ("--autotune", "-m", "--", "--b", "a b", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SEES)
    (tmp_path / "scripts" / "helper.py").write_text("VALUE = 3")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "script", "end", "code"),
    [
        (("-u", "-O"), ("scripts/train.py",), "raise", 1),
        ((), ("scripts/none.py",), "", 2),
        ((), ("-m", "train"), "", 7),
    ],
    ids=["error", "missing", "module"],
)
def test_all_is_as_with_python(
    folder: Path, options: tuple[str, ...], script: tuple[str, ...], end: str, code: int
) -> None:
    where = folder / "scripts" if "-m" in script else folder
    end_words = (end,) if end else ()
    plain = start(*options, *script, *ARGUMENTS, *end_words, folder=where)
    launched = start(*options, "-m", "bagua_client", *script, *ARGUMENTS, *end_words, folder=where)
    assert plain.returncode == code
    assert (launched.stdout, launched.stderr, launched.returncode) == (
        plain.stdout,
        plain.stderr,
        plain.returncode,
    )


def test_options_before_it_stay_in_any_spelling(folder: Path) -> None:
    plain = start("-OO", "scripts/train.py", folder=folder)
    for spelling in (("-OOm", "bagua_client"), ("-OO", "-mbagua_client")):
        assert start(*spelling, "scripts/train.py", folder=folder).stdout == plain.stdout


def test_under_options_that_hide_our_variables_it_is_an_error(folder: Path) -> None:
    begin = f"import sys; sys.path += {sys.path}; from bagua_client.launcher.script import main"
    done = start("-E", "-c", f"{begin}; main(['scripts/train.py'])", folder=folder)
    assert done.returncode == 2
    assert "Python's options" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--as-bagua", "train.py"], "needs the package"),
        ([], "SCRIPT is missing"),
        (["--autotune-max-samples", "0", "train.py"], "MAX_SAMPLES must be"),
    ],
)
def test_what_would_not_be_tuned_is_an_error(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job_environment, "AS_BAGUA", "")
    with pytest.raises(SystemExit) as end:
        script.main(words)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


CHILDREN = """
import importlib.util, os, subprocess, sys
assert importlib.util.find_spec("torch")  # as transformers does, long before it imports it
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel as DDP

class Own(DDP):
    pass

def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DDP(torch.nn.Linear(2, 2), bucket_cap_mb=10)
    assert type(model) is DDP and isinstance(model, parallel.DistributedDataParallel)
    assert isinstance(Own(torch.nn.Linear(2, 2)), parallel.distributed.DistributedDataParallel)
    model(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        torch.save([model, model.state_dict()], "model.pt")
        print("spawned", model.configuration, os.environ.get("BAGUA_AUTOTUNE"), flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), 2)
    code = "from torch.nn import parallel as p; print(p.DistributedDataParallel.configuration)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def _loaded(file: str) -> str:
    model, state = torch.load(file, weights_only=False)
    assert type(model) is Stock
    assert list(model.state_dict()) == list(state) == ["module.weight", "module.bias"]
    model(torch.ones(1, 2)).sum().backward()
    return f"{type(model).__module__}.{type(model).__name__} on {dist.get_rank()}"


def test_children_have_it_too_and_saved_models_name_torchs_class(
    tmp_path: Path, two_ranks: RankPool
) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = start("-m", "bagua_client", "--autotune-level", "0", "train.py", port, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "spawned bucket 10 MiB 0" in done.stdout
    assert "<property object" in done.stdout
    name = "torch.nn.parallel.distributed.DistributedDataParallel"
    assert two_ranks.run(_loaded, str(tmp_path / "model.pt")) == [f"{name} on 0", f"{name} on 1"]


@pytest.mark.parametrize("command", [["-m", "bagua_client"], ["bagua-run"]])
def test_without_torch_a_command_says_in_a_sentence_what_to_install(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "bagua-run").write_text("import bagua_client.run")
    # Without the packages that are installed, of which torch is one.
    source = {"PYTHONPATH": str(Path(bagua_client.__file__).parents[1])}
    done = start("-S", *command, "--help", folder=tmp_path, variables=source)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "bagua_client needs PyTorch, which is not installed: pip install torch\n"
    )


def test_a_strategy_of_lightnings_is_registered_when_the_script_imports_it(tmp_path: Path) -> None:
    """And where that fails the script goes on. Folders with the libraries' names show when who is
    imported."""
    for name in ("pytorch_lightning", "ours/bagua_client/lightning"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pytorch_lightning" / "__init__.py").write_text("print('theirs')")
    (tmp_path / "train.py").write_text(
        "import bagua_client\n"
        "bagua_client.__path__.insert(0, 'ours/bagua_client')\n"
        "print('begins')\nimport pytorch_lightning\nprint('trains')\n"
    )
    file = tmp_path / "ours" / "bagua_client" / "lightning" / "__init__.py"
    file.write_text("print('ours')\nraise RuntimeError('too old')")
    done = start("-m", "bagua_client", "train.py", folder=tmp_path)
    assert done.stdout.split() == ["begins", "theirs", "ours", "trains"]
    assert "too old" in done.stderr
    assert done.returncode == 0
