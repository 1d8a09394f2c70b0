"""The asserts of contracts tell values, as those of tests do."""

import pytest

pytest.register_assert_rewrite(
    "bagua_autotune.testing", "bagua_client.testing.algorithms", "bagua_client.testing.tunables"
)
