"""What keeps a job's communication from running beside its computing, or from the faster link, and
says nothing: rules over what its ranks have seen.

Each rule says what it costs as far as its source says so; nothing of it is measured here. What the
ranks could not see gives no warning. See bagua_client.checking.surroundings for what they look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NCCL_PAGE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_PAGES = "https://docs.pytorch.org/docs/stable"
TORCH_SOURCES = "https://github.com/pytorch/pytorch/blob/v2.13.0"
CUDA_PAGE = (
    "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"
)
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py"
NAMED_RANKS = 4

Seen = Mapping[str, Any]
"""What some ranks have seen alike, and ``ranks``: these."""


@dataclass(frozen=True)
class Hindrance:
    """One that was found.

    Attributes:
        name: what it is.
        seen: where, and on which ranks.
        costs: what it does, by its source.
        advice: what to do.
        source: pages of the project that it belongs to, or its code.
    """

    name: str
    seen: str
    costs: str
    advice: str
    source: str


@dataclass(frozen=True)
class Surroundings:
    """What the rules look at.

    Attributes:
        seen: by all ranks, those together that have seen the same.
    """

    ranks: int
    nodes: int
    seen: Sequence[Seen]

    def where(self, find: Callable[[Seen], str]) -> str:
        """What ``find`` says of the ranks, each time with their numbers; empty: nothing of any."""
        found: dict[str, list[int]] = {}
        for seen in self.seen:
            if words := find(seen):
                found.setdefault(words, []).extend(seen["ranks"])
        return "; ".join(f"{words} ({self._name(ranks)})" for words, ranks in found.items())

    def _name(self, ranks: Sequence[int]) -> str:
        if len(ranks) == self.ranks:
            return "all ranks"
        some = ", ".join(map(str, sorted(ranks)[:NAMED_RANKS]))
        rest = len(ranks) - NAMED_RANKS
        return f"rank {some}" + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class Rule:
    """How a hindrance is found: ``find`` says where it was seen, or nothing."""

    name: str
    find: Callable[[Surroundings], str]
    costs: str
    advice: str
    source: str


def hindrances(facts: Mapping[str, Any]) -> list[Hindrance]:
    """What of the rules is found.

    Args:
        facts: what the ranks have written.
    """
    seen = [each for each in facts["seen"] if "variables" in each]
    job = Surroundings(facts["ranks"], facts["nodes"], seen)
    return [
        Hindrance(rule.name, where, rule.costs, rule.advice, rule.source)
        for rule in RULES
        if (where := rule.find(job))
    ]


def _variable(
    names: Sequence[str], is_on: Callable[[str], bool], key: str, value: str
) -> Callable[[Surroundings], str]:
    """Finds the first of these variables that is on, on ranks whose ``key`` has this value."""

    def find(seen: Seen) -> str:
        if seen[key] != value:
            return ""
        for when, variables in (
            ("in the environment when the model was wrapped", seen["variables"]),
            ("in the environment only later, so it may not be in force", seen["variables_later"]),
        ):
            for name in names:
                if is_on(variables.get(name, "")):
                    return f"{name}={variables[name]} {when}"
        return ""

    return lambda job: job.where(find)


def _is_number_on(text: str) -> bool:
    """As NCCL reads a switch."""
    try:
        return int(text.strip(), 0) != 0
    except ValueError:
        return False


def _is_word_on(text: str) -> bool:
    """As torch reads a switch."""
    return text.lower() in ("y", "yes", "1", "t", "true")


def _beside_others(find: Callable[[Surroundings], str]) -> Callable[[Surroundings], str]:
    """Only where some node has several ranks."""
    return lambda job: find(job) if job.ranks > job.nodes else ""


def _debugged(seen: Seen) -> str:
    is_on = seen["debug_level"] == "DETAIL"
    return "torch.distributed.get_debug_level() is DETAIL" if is_on else ""


def _searches_in_vain(job: Surroundings) -> str:
    """All ranks must have reached all parameters: torch marks as unused what some rank left out."""
    passes = [seen.get("passes", 0) for seen in job.seen]
    left_out = any(seen.get("passes_without_all", 0) for seen in job.seen)
    if not passes or not all(passes) or left_out:
        return ""
    return job.where(
        lambda seen: f"all parameters got a gradient in each of {min(passes)} backward passes"
    )


def _unsplit(seen: Seen) -> str:
    if seen.get("splits_at_buckets") is False:
        return "torch._dynamo.config.optimize_ddp is off, and torch.compile was used"
    if seen.get("compiled_before"):
        return "the module was compiled before it was wrapped, and nothing was compiled since"
    return ""


def _over_sockets(job: Surroundings) -> str:
    """Only where messages leave a node."""
    return job.where(_sockets_of) if job.nodes > 1 else ""


def _sockets_of(seen: Seen) -> str:
    variables = seen["variables"]
    why = ""
    if seen["backend"] == "gloo":
        why = "" if seen["gloo_over_infiniband"] else "the backend is gloo"
    elif seen["backend"] == "nccl" and seen["nccl_network"]:
        if seen["nccl_network"] == "Socket":
            why = 'NCCL\'s log says "Using network Socket"'
    elif seen["backend"] == "nccl":
        name = "NCCL_IB_DISABLE"
        if variables.get("NCCL_NET", "").lower() == "socket":
            why = f"NCCL_NET={variables['NCCL_NET']} in the environment"
        elif _is_number_on(variables.get(name, "")):
            why = f"{name}={variables[name]} in the environment"
    ports = seen["infiniband"]
    return f"{why}, and {', '.join(ports)} is ACTIVE" if why and ports else ""


RULES = (
    Rule(
        "one work queue to the GPU",
        _variable(["CUDA_DEVICE_MAX_CONNECTIONS"], lambda text: text == "1", "device", "cuda"),
        "work of different streams that shares a queue may wait for each other, so communication "
        "need not run beside computing; Megatron-LM refuses to shard a model with it",
        "unset it, unless the job needs it: Megatron-LM's tensor and context parallelism do on "
        "GPUs before Blackwell",
        f"{CUDA_PAGE}, {MEGATRON}",
    ),
    Rule(
        "kernels that are launched one by one",
        _variable(["CUDA_LAUNCH_BLOCKING"], _is_number_on, "device", "cuda"),
        "the process waits for each kernel before it launches the next, so nothing runs beside it",
        "unset it; it is for debugging",
        f"{TORCH_PAGES}/notes/cuda.html#asynchronous-execution",
    ),
    Rule(
        "waits that block the process",
        _variable(
            ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"], _is_word_on, "backend", "nccl"
        ),
        "wait() blocks the process and not only its stream, which gives the GPU no new work until "
        "that communication is done",
        "unset it; a collective that hangs ends the process without it, too "
        "(TORCH_NCCL_ASYNC_ERROR_HANDLING)",
        f"{TORCH_PAGES}/torch_nccl_environment_variables.html",
    ),
    Rule(
        "NCCL's launches in a group",
        _variable(["NCCL_LAUNCH_MODE"], lambda text: text.upper() == "GROUP", "backend", "nccl"),
        "the GPUs of one process wait for each other before each launch; where each process has "
        "one GPU, NCCL 2.30 does nothing with it. Deprecated since NCCL 2.9",
        "unset it",
        f"{NCCL_PAGE}#nccl-launch-mode",
    ),
    Rule(
        "GPUs of a node that do not reach each other directly",
        _beside_others(_variable(["NCCL_P2P_DISABLE"], _is_number_on, "backend", "nccl")),
        "NCCL does without NVLink and PCI between the GPUs of a node, and copies by way of the "
        "host's memory",
        "unset it, unless it works around a fault of this machine",
        f"{NCCL_PAGE}#nccl-p2p-disable",
    ),
    Rule(
        "no shared memory between the processes of a node",
        _beside_others(_variable(["NCCL_SHM_DISABLE"], _is_number_on, "backend", "nccl")),
        "where GPUs cannot reach each other directly, NCCL takes the network between them",
        "unset it; a container may need a larger /dev/shm instead",
        f"{NCCL_PAGE}#nccl-shm-disable",
    ),
    Rule(
        "InfiniBand that is not used",
        _over_sockets,
        "what leaves a node travels over IP sockets, not over InfiniBand",
        "with NCCL, unset what turns it off, and see that the job's container has the device "
        "files; with gloo on CPUs, name the interface for IP over InfiniBand in GLOO_SOCKET_IFNAME",
        f"{NCCL_PAGE}#nccl-ib-disable, {TORCH_PAGES}/distributed.html#which-backend-to-use",
    ),
    Rule(
        "collectives that are checked one by one",
        lambda job: job.where(_debugged),
        "the ranks compare each collective before they begin it; torch says to use it only when "
        "debugging",
        "take DETAIL out of TORCH_DISTRIBUTED_DEBUG, or out of the script's set_debug_level()",
        f"{TORCH_PAGES}/distributed.html#torch-distributed-debug",
    ),
    Rule(
        "a search for unused parameters that finds none",
        _searches_in_vain,
        "find_unused_parameters=True goes through the graph in each step, sends one more message, "
        "and keeps torch from cutting its buckets in the order in which gradients become ready",
        "leave it out, unless other steps than those leave parameters out: then torch raises an "
        "error without it",
        f"{TORCH_SOURCES}/torch/csrc/distributed/c10d/reducer.cpp",
    ),
    Rule(
        "compiled graphs that do not end where buckets end",
        lambda job: job.where(_unsplit),
        "the gradients of a graph become ready together, when its backward pass is over; those of "
        "a module that is one graph leave when there is nothing more to compute beside them",
        "leave optimize_ddp on, and make the first step after the model was wrapped: then "
        "torch.compile splits the graph where buckets end",
        f"{TORCH_SOURCES}/torch/_dynamo/config.py",
    ),
)
