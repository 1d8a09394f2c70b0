"""Which of Bagua's tests say nothing about this project, and why."""

from __future__ import annotations

TORCHS = "tests PyTorch itself; Bagua's part of it is in test_bagua_ddp.py"
LIGHTNINGS = "needs the BaguaStrategy of Lightning 1.9; ours is tested in tests/integrations"
FILES = {
    "torch_api/data_parallel/test_c10d_common.py": TORCHS,
    "pytorch_lightning/test_bagua_strategy.py": LIGHTNINGS,
}
"""Not run, on any number of devices."""
FUSED = (
    "asserts that an optimizer does not fuse beside with_bagua(do_flatten=True); here it does, "
    "and the results are equal"
)
TESTS = {
    "contrib/test_fused_optimizer.py::TestFusedOptimizer::test_decentralized": FUSED,
    "contrib/test_fused_optimizer.py::TestFusedOptimizer::test_gradient_allreduce": FUSED,
    "comm/test_communicator.py::TestCommunication::test_reduce_scatter": (
        "asserts that a mean over n ranks equals itself divided by n: passes on one GPU only"
    ),
}
"""Not run on GPUs, or on what is called so."""
ON_THE_CPU = {
    "contrib/test_sync_bn.py::Test_Sync_Bn::test_syncbn": (
        "compares with torch.nn.SyncBatchNorm, which refuses tensors of the CPU; ours is compared "
        "with one process in tests/training/test_sync_batch_norm.py"
    ),
}
"""Not run on what is called a GPU."""
