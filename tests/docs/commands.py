"""The commands of the documentation that are not run as printed, and what is done instead.

A command of which no line below speaks is run by bash, as printed. To add one that cannot be run:
one line in INSTEAD. To add an indented block that is no command: one line in NOT_COMMANDS, or a
fence that says its language.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tests.docs.checks import Check, Extras, Files, Helm, Make, Named, Parsed, Read, Run, Serve

FORKED = "python tests/torchrun.py 2"  # Torchrun's own processes import torch for seconds each.
TWO_RANKS = Run(
    instead=(("torchrun --nproc-per-node 8", FORKED),),
    prints=r"autotune: bucket .*; \d+ trials, \d+ steps",
)
WITH_SERVICE = replace(
    TWO_RANKS, instead=(("--nproc-per-node 8", "--nproc-per-node 2"),), has_service=True
)
FEW = Run(
    instead=(
        ("torchrun --nproc-per-node 2", FORKED),
        ("source_code.py", "source_code.py --functions 40 --epochs 1"),
    ),
    prints=r"epoch 0  loss",
)
KUBERNETES = Files("tests/deploy/test_kubernetes.py")
SLURM = Files("tests/deploy/test_slurm.py")
LAUNCHED = Files("tests/e2e/launching/test_launching.py")
CONTAINERS = Files("tests/deploy/test_compose.py")

# What the whole command must match, what is done instead of running it, and why. The first counts.
INSTEAD: tuple[tuple[str, Check, str], ...] = (
    (r"(torchrun|bagua-run|accelerate) .*examples/unmodified/.*", LAUNCHED, "it runs them"),
    (
        r"(bagua-run --as-bagua|python -m bagua_compat) .*",
        Files("tests/compat/test_surface.py"),
        "a script of Bagua's",
    ),
    (r"bagua-run .*", LAUNCHED, "8 ranks on each of two hosts"),
    (
        r".*torchrun --nnodes=1:4 .*",
        Parsed(),
        "several hosts; e2e/after_tuning/test_elastic.py",
    ),
    (
        r".*examples/lightning_digits\.py .*",
        Parsed(),
        "takes minutes; tests/e2e/launching/test_lightning.py",
    ),
    (
        r"PYTHONPATH=\S+ python -m tests\.\S+",
        Files("tests/integrations/strategy/lightning_on_gpus.py"),
        "GPUs",
    ),
    (r"BAGUA_CONFIGURATION=\S+ .*", Files("tests/e2e/test_results.py"), "8 ranks want 8 cores"),
    (r"python tests/upstream_bagua/run\.py .*", Parsed(), "takes many minutes on a GPU"),
    (r"make .*", Make(), "takes minutes, or runs this test"),
    (
        r"python -m examples\.demo",
        Parsed(),
        "takes minutes; tests/benchmarks/testbed has its parts",
    ),
    (r"pip install .*", Extras(), "was done before this test ran"),
    (
        r"torchrun --nproc-per-node 8 -m bagua_client --autotune train\.py",
        WITH_SERVICE,
        "8 ranks want 8 cores; one that rank 0 starts is slow beside them",
    ),
    (r"(.*_ALLOW=|XDG_DATA_HOME=).* train\.py", Read(), "README.md's, with other variables"),
    (r"(\w+=\S+ )*torchrun --nproc-per-node 8 .*train\.py", TWO_RANKS, "8 ranks want 8 cores"),
    (
        r"(BAGUA_AUTOTUNE=1 python|python -m bagua_client --autotune) train\.py",
        Run(has_service=True),
        "a service that each rank 0 starts takes seconds; the one before is run with its own",
    ),
    (r".*torchrun --nproc-per-node 2 examples/digits\.py", Parsed(), "takes minutes"),
    (r"torchrun .*examples/source_code\.py", FEW, "takes a minute"),
    (r"torchrun .*examples/source_code\.py --plain", Parsed(), "the same, without our data"),
    (r"python examples/launch\.py .*", Parsed(), "takes minutes; one is in tests/e2e"),
    (r"bagua-autotune serve .*postgresql.*", Parsed(), "tests/autotune/store has a PostgreSQL"),
    (r"bagua-autotune serve .*--teams .*", Parsed(), "tests/autotune/api/test_teams.py has a file"),
    (r"bagua-autotune serve .*", Serve(), "a free port, and no network"),
    (
        r"bagua-autotune simulate .*--(nodes|bandwidth|latency|algorithms).*",
        Parsed(),
        "tests/simulator/test_commands.py runs the page's, and has each of these options",
    ),
    (r"python train\.py fit .*", Parsed(), "a script of the reader's that takes arguments"),
    (r"bagua-autotune check .*", Parsed(), "ends the run after a minute, not as a tuning does"),
    (r".*bagua-autotune system .*", Parsed(), "takes minutes; tests/e2e/test_system.py runs it"),
    (r".*bagua\.distributed\..*", Files("tests/e2e/launching/test_bagua_worker.py"), "Bagua's own"),
    (r"prometheus .*", Files("tests/dashboards/prometheus/test_rules.py"), "a port of its own"),
    (
        r"bagua-autotune delete --everything",
        Files("tests/autotune/cli/commands/test_delete.py"),
        "others need the jobs",
    ),
    (
        r"bagua-autotune delete .*",
        Files("tests/autotune/cli/commands/test_delete.py"),
        "others need the job",
    ),
    (
        r"bagua-autotune restore .*",
        Files("tests/autotune/cli/commands/test_maintenance.py"),
        "replaces jobs",
    ),
    (
        r"(pg_dump|dropdb|createdb|pg_restore) .*",
        Files("tests/autotune/store/maintenance/test_backups.py"),
        "the test that is named runs them on a PostgreSQL of its own",
    ),
    (r"docker .*", CONTAINERS, "there is no Docker here; `make image` runs it where there is"),
    (r"kubectl .*", KUBERNETES, "there is no Kubernetes here"),
    (r"helm upgrade --install .*", Helm(), "there is no Kubernetes here"),
    (r"deploy/build_distributions\.sh .*", Files("tests/deploy/test_distributions.py"), "PyPI"),
    (r"gh attestation .*", Files("tests/deploy/test_distributions.py"), "nothing is released"),
    (r"deploy/pin_images\.sh.*", Files("tests/deploy/test_references.py"), "asks registries"),
    (r"deploy/pin_requirements\.sh", Files("tests/deploy/test_image.py"), "asks PyPI"),
    (r"deploy/kubernetes/render\.sh", Files("tests/deploy/test_helm.py"), "needs helm"),
    (r"sbatch .*", SLURM, "the test that is named submits it to a Slurm of its own"),
    (r"sudo .*(/opt/bagua-autotune|/etc|systemctl).*", SLURM, "changes the machine"),
    (r"sudo apt-get .*", Files(".ci/run"), "changes the machine"),
    (r".*benchmarks[./]\w+.*", Parsed(), "takes minutes to hours, wants root or two GPUs"),
)

# How indented blocks begin that are no commands.
NOT_COMMANDS = (
    r"result: bucket .*",  # README.md: what is printed
    r"\d+ runs of an interrupted search .*",  # docs/system.md
    r"spent \d+ GPU-minutes .*",
    r"autotune(:| stops using) (job|bucket) .*",
    r"tests/ .*",  # docs/design.md: a list of folders
    r"rule_files: .*",  # docs/monitoring.md: Prometheus
    r"- source_labels: .*",
    r"location .*",  # nginx
    r" *proxy_set_header .*",
    r"host0 +host1.*",  # docs/testbed.md: a drawing
)


# The same for commands inside sentences, which often lack their arguments; these count
# before and of what neither lists the arguments are looked at.
MENTIONED: tuple[tuple[str, Check, str], ...] = (
    (r"bagua-autotune [a-z]+", Named(), "without its arguments"),
    (r"python -m bagua_client\.run", LAUNCHED, "without its arguments"),
    (r"python -I", LAUNCHED, "an option of Python's"),
    (r"python -m docs\.screenshots", Files("docs/screenshots.py"), "takes no arguments"),
)


def is_command_block(first_line: str) -> bool:
    return not any(re.fullmatch(pattern, first_line) for pattern in NOT_COMMANDS)


def instead_of(command: str) -> Check | None:
    """What is done in place of running it; None: it is run."""
    return _first(INSTEAD, command)


def check_of_mention(command: str) -> Check:
    """What is looked at of a command inside a sentence."""
    return _first((*MENTIONED, *INSTEAD), command) or Parsed()


def _first(table: tuple[tuple[str, Check, str], ...], command: str) -> Check | None:
    return next((check for pattern, check, _ in table if re.fullmatch(pattern, command)), None)
