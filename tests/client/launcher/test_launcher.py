"""A script that ``python -m bagua_client`` starts finds everything as ``python`` would have it."""

from __future__ import annotations

import ast
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client import launcher
from bagua_client.environment import Environment
from bagua_client.launcher import FLAGS, GONE, farewells, spellings, variables
from bagua_client.run import parser
from tests.client.launcher.programs import start
from tests.outside import BAGUA, folder_of
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
    begin = f"import sys; sys.path += {sys.path}; from bagua_client.launcher import main"
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
    monkeypatch.setattr(launcher, "AS_BAGUA", "")
    with pytest.raises(SystemExit) as end:
        launcher.main(words)
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


SETS = {
    "bagua_service_port": ("29501", "BAGUA_SERVICE_PORT", "29501"),
    "default_bucket_size": ("10485760", "BAGUA_DEFAULT_BUCKET_SIZE", "10485760"),
    "autotune_level": ("1", "BAGUA_AUTOTUNE", "1"),
    "autotune_max_samples": ("60", "BAGUA_AUTOTUNE_MAX_SAMPLES", "60"),
    "autotune_memory": ("0.8", "BAGUA_AUTOTUNE_MEMORY", "0.8"),
    "autotune_max_minutes": ("5", "BAGUA_AUTOTUNE_MAX_MINUTES", "5.0"),
    "autotune_max_rounds": ("1", "BAGUA_AUTOTUNE_MAX_ROUNDS", "1"),
    "autotune_fresh": (None, "BAGUA_AUTOTUNE_FRESH", "1"),
    "autotune_sampling_confidence_time": ("5", "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "5.0"),
    "autotune_warmup_time": ("30.0", "BAGUA_AUTOTUNE_WARMUP_TIME_S", "30.0"),
    "is_output_autotune_log": (None, "BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "1"),
    "autotune": (None, "BAGUA_AUTOTUNE", "1"),
}
"""Flag: a value on the command line, the variable, and its value."""
SCRIPT = ("train.py", "--lr", "0.1", "--bagua", "--autotune")


def _options(file: Path) -> Iterator[tuple[list[str], bool]]:
    """The spellings of each flag that the program declares, and whether a value follows."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if str(names[0]).startswith("-"):
                action = keywords.get("action", "'store'")
                yield [str(name) for name in names], action in ("'store'", "env", "'append'")


@pytest.mark.parametrize("program", ["distributed/launch", "distributed/run", "script/baguarun"])
def test_all_flags_of_bagua_are_understood(program: str) -> None:
    known = parser()
    found = list(_options(folder_of(BAGUA) / "bagua" / f"{program}.py"))
    assert len(found) >= 8
    for names, takes_value in found:
        for name in names:
            value = {"--start_method": "spawn"}.get(name, "1")
            words = [name, value] if takes_value else [name]
            options = known.parse_args([*words, *SCRIPT])
            assert options.training_script == SCRIPT[0], name
            assert tuple(options.training_script_args) == SCRIPT[1:], name


@pytest.mark.parametrize("name", SETS)
def test_a_flag_says_what_its_variable_says(name: str) -> None:
    value, variable, expected = SETS[name]
    for spelling in spellings(name):
        given = [spelling] if value is None else [f"{spelling}={value}"]
        found = variables(parser().parse_args([*given, *SCRIPT]))
        assert found == {variable: expected}
        Environment.read(found)


def test_the_table_is_whole_and_what_is_not_given_says_nothing() -> None:
    assert {flag.name for flag in FLAGS} == set(SETS)
    options = parser().parse_args([*SCRIPT])
    assert variables(options) == {}
    assert farewells(options) == []


def test_what_is_gone_is_told_in_a_line_each() -> None:
    words = [
        word
        for gone in GONE
        for word in (spellings(gone.name)[-1], *(["1"] if gone.takes_value else []))
    ]
    lines = farewells(parser().parse_args([*words, *SCRIPT]))
    assert len(lines) == len(GONE) - 1
    for line in lines:
        assert line.startswith("--")
        assert "\n" not in line
